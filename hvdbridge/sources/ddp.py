"""Gradients from DistributedDataParallel, through its communication hook.

Rules:

1. DDP calls hooks strictly in bucket-index order, so they are handed on as they come.
2. The first step is one bucket, or cut in registered order, and rebuilt after it: layouts are looked up by the
   bucket's parameters.
3. DDP's engine callback takes over what has arrived while the rest travels, so ours, which waits for all, follows it.
   A failure leaves backward() through ours; DDP's futures get the raw buckets then, for it would make another error
   of them. Where DDP waits for traffic of its own, too, which ranks that failed never send, ours comes first.
4. The driver is flushed with the last bucket: in the first step of a static graph DDP waits where it submits them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn import Parameter

from hvdbridge.aggregator import Aggregator, Piece
from hvdbridge.bucket import Layout
from hvdbridge.errors import Unsupported
from hvdbridge.sources.base import Source, at_end_of_backward, inside_backward, refuse_reentrant


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """DDP whose ``state_dict()`` has the bare module's keys, so that checkpoints move between backends."""

    @property
    def bare(self) -> torch.nn.Module:
        """The module without what torch.compile puts around it."""
        module: torch.nn.Module = getattr(self.module, "_orig_mod", self.module)
        return module

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, without our hook: torch registers none in a copy, either."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_comm_hooks": []}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.bare.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.bare.load_state_dict(*args, **kwargs)


class DdpSource(Source):
    """Feeds an :class:`Aggregator` from a DDP module."""

    def __init__(
        self,
        model: DistributedDataParallel,
        params: Mapping[str, Parameter],
        aggregator: Aggregator,
        own_group: Any = None,
    ) -> None:
        super().__init__(aggregator)
        self._own_group = own_group  # made for this model alone
        self._model: DistributedDataParallel | None = model
        self._names = {parameter: name for name, parameter in params.items()}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._complete = True  # the step's last bucket came
        self._handles = [p.register_post_accumulate_grad_hook(self._touch) for p in params.values()]

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own types
            return self._bucket(bucket)

        model.register_comm_hook(None, hook)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        # DDP cannot give a hook back, and its reducer, unseen by the garbage collector, holds the hook and so this.
        self._model = None
        self._names.clear()
        self._layouts.clear()
        self.touched.clear()
        if self._own_group is not None:
            dist.destroy_process_group(self._own_group)

    @contextmanager
    def join(self) -> Iterator[None]:
        assert self._model is not None, "hooks are on"
        with Join([self._model]):  # DDP shadows its own traffic and calls our hook with zeros
            yield
            self.aggregator.catch_up()
            self.aggregator.joined = True
        if self.running:
            self._finish()

    def _touch(self, parameter: Tensor) -> None:
        self.touched.append(parameter)
        if self.steps == 0:  # DDP's first hook may come too late to tell
            refuse_reentrant()

    def _bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            if inside_backward():
                finds_unused = self._model is not None and self._model.find_unused_parameters
                at_end_of_backward(self._finish if finds_unused else self._finish_after_ddp)
            elif self.running:  # within join() hooks are called outside of backward: the step before ends here
                self._finish()
            self.begin()
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise Unsupported(
                f"rank {self.aggregator.communicator.rank}: sparse gradients are taken by no policy. "
                "Use sparse=False in the Embedding."
            )
        devices = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

        def deliver(update: Tensor | None) -> None:
            if update is not None and update.storage_offset() != 0:
                update = update.clone()  # DDP looks at the storage from its beginning
            if not future.done():  # by an update, and then another piece of its flow failed
                future.set_result(buffer if update is None else update)

        self._complete = bucket.is_last()
        self.aggregator.submit(Piece(self._layout(bucket.parameters()), buffer, deliver), last=self._complete)
        if self._complete:
            self.aggregator.driver.flush()
            if self.aggregator.joined:
                self.aggregator.end_ahead()
        return future

    def _layout(self, parameters: list[Tensor]) -> Layout:
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:
            layout = Layout({self._names[p]: p.shape for p in parameters})  # type: ignore[index]
            self._layouts[key] = layout
        return layout

    def finished(self) -> None:
        # A parameter without a gradient keeps the last bucket back, and DDP hands nothing out before that comes.
        local = [] if self._complete else self.touched[:]
        super().finished()
        self.touched += local

    def _finish_after_ddp(self) -> None:
        at_end_of_backward(self._finish)  # DDP's callback stands already

    def _finish(self) -> None:
        try:
            self.aggregator.end()
        finally:
            self.finished()
