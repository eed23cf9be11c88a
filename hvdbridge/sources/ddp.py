"""Gradients from DistributedDataParallel, through its communication hook.

Rules:

1. DDP calls hooks strictly in bucket-index order, so they are handed on as they come.
2. The first step is one bucket, or cut in registered order, and rebuilt after it: layouts are looked up by the
   bucket's parameters.
3. DDP's engine callback takes over what has arrived while the rest travels, so ours, which waits for all, follows it.
   A failure leaves backward() through ours; DDP's futures get the buckets as they came then, for it would make another
   error of them. Where DDP waits for traffic of its own, too, which ranks that failed never send, ours comes first.
4. The driver is flushed with the last bucket: in the first step of a static graph DDP waits where it submits them.
5. DDP divides by the number of ranks while it copies gradients into its buckets, unless it has a hook, which takes
   another pass over memory. Where a policy needs no more (:attr:`~hvdbridge.policy.Policy.takes_shares`) and there are
   no weights, it gets none: its reducer is given a process group whose all-reduce comes here. A hook can be registered
   at any time, but not given back.
6. DDP lays a dense parameter into its bucket as it lies in memory (channels_last), and a policy reads by index: such
   buckets are put in order and back, unless the policy treats every element alike.
7. DDP without its source is its module alone: autograd's hooks are off, and no forward sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Join
from torch.nn import Parameter

from hvdbridge.aggregator import Aggregator, Piece
from hvdbridge.bucket import Layout
from hvdbridge.errors import Unsupported
from hvdbridge.policy import Policy
from hvdbridge.sources.base import Source, at_end_of_backward, inside_backward, refuse_reentrant
from hvdbridge.sources.wrapper import Wrapper

Watch = Callable[[str], AbstractContextManager[None]]


class ReducerGroup(dist.ProcessGroup):
    """What DDP's reducer takes for its process group: ``shares`` gets buckets that it divided, ``group`` the rest."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self.shares: Callable[[Tensor], torch.futures.Future[Tensor]] | None = None

    def getBackendName(self) -> str:  # DDP's logger asks, and looks into backends that it knows
        return "hvdbridge"

    # Of all operations a reducer asks for these two.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        if self.shares is None:
            return self._group.allreduce(tensors, opts)
        return _create_work_from_future(self.shares(tensors[0]))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        return self._group.broadcast(tensors, opts)


class DistributedDataParallel(Wrapper, torch.nn.parallel.DistributedDataParallel):
    """DDP whose ``state_dict()`` has the bare module's keys; once closed, and in copies, it is its module alone.

    Attributes:
        reducer_group: its reducer's process group, where that is not DDP's own.
        expects_backward: the last forward told the reducer to aggregate in the next backward, whatever is said there.
    """

    reducer_group: ReducerGroup | None = None
    expects_backward = False

    _closed = False
    _watch: Watch

    def __init__(self, module: torch.nn.Module, shares: bool, watch: Watch, **options: Any) -> None:
        self.__dict__.update(_shares=shares, _watch=watch)
        super().__init__(module, **options)

    def _ddp_init_helper(self, *args: Any, **options: Any) -> Any:
        group = self.process_group
        if self._shares:
            self.process_group = self.reducer_group = ReducerGroup(group)
        try:
            return super()._ddp_init_helper(*args, **options)  # type: ignore[no-untyped-call]
        finally:
            self.process_group = group

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Send nothing any more: gradients stay local."""
        self._closed = True
        # A forward may have told the reducer to expect a backward
        self._remove_autograd_hooks()  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._closed:
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._watch("what DDP itself sends before a forward (buffers, the order of buckets)"):
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        self.expects_backward = torch.is_grad_enabled() and self.require_backward_grad_sync
        return super()._post_forward(output)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refused: what aggregates here is a policy.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(
            "register_comm_hook on the model of a GradientSynchronizer, whose gradients its policy aggregates. Give it "
            "policy=hb.from_comm_hook(state, hook)."
        )

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, without our hook, and closed: a copy belongs to no synchronizer."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        ours: dict[str, Any] = {"_comm_hooks": [], "reducer_group": None, "_shares": False, "_closed": True}
        return state | ours | {"_watch": nullcontext}


@dataclass(frozen=True)
class Strided:
    """A parameter that lies in its bucket as in memory, and not by index."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def by_index(self, buffer: Tensor) -> None:
        in_memory, by_index = self._views(buffer)
        by_index.copy_(in_memory.clone())

    def in_memory(self, buffer: Tensor) -> None:
        in_memory, by_index = self._views(buffer)
        in_memory.copy_(by_index.clone())

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        piece = buffer[self.offset : self.offset + self.shape.numel()]
        return piece.as_strided(self.shape, self.stride), piece.view(self.shape)


class Layouts:
    """The layouts of DDP's buckets, by their parameters."""

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self.names = names
        self._known: dict[tuple[int, ...], tuple[Layout, list[Strided]]] = {}

    def piece(
        self, parameters: Sequence[Tensor], buffer: Tensor, future: torch.futures.Future[Tensor], policy: Policy
    ) -> Piece:
        """A bucket for ``policy``, whose update goes to ``future`` (rule 6)."""
        key = tuple(map(id, parameters))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.look(parameters)
        layout, strided = known
        return piece_of(layout, buffer, future, () if policy.takes_shares else strided)

    def clear(self) -> None:
        self._known.clear()

    def look(self, parameters: Sequence[Tensor]) -> tuple[Layout, list[Strided]]:
        """At a bucket that was not seen before."""
        layout = Layout({self.names[p]: p.shape for p in parameters})
        strided = [
            Strided(layout.offsets[self.names[p]], p.shape, p.stride())
            for p in parameters
            if not p.is_contiguous() and torch.empty_like(p, device="meta").stride() == p.stride()  # i.e. it is dense
        ]
        return layout, strided


def piece_of(
    layout: Layout,
    buffer: Tensor,
    future: torch.futures.Future[Tensor],
    strided: Sequence[Strided] = (),
    scaled: bool = False,
) -> Piece:
    """DDP's bucket for an aggregator; ``future`` gets what DDP waits for."""
    for each in strided:
        each.by_index(buffer)

    def deliver(update: Tensor | None) -> None:
        if update is not None and strided:  # not in the update itself, which may be part of the policy's state
            update = buffer.copy_(update)
            for each in strided:
                each.in_memory(buffer)
        elif update is not None and update.storage_offset() != 0:
            update = update.clone()  # DDP looks at the storage from its beginning
        if not future.done():  # by an update, and then another piece of its flow failed
            future.set_result(buffer if update is None else update)

    return Piece(layout, buffer, deliver, scaled)


def future_of(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Of what becomes of ``buffer``."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


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
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in params.items()}
        self._layouts = Layouts(self._names)
        self._divided_layouts: dict[tuple[int, int], Layout] = {}  # by place and size
        self._complete = True  # the step's last bucket came
        self._numel = sum(p.numel() for p in params.values())
        self._divided = 0  # elements of this step that came divided
        self._begun = False  # a step whose first bucket has not come
        self._hook(self._touch)
        self._first_step = True
        self._undecided = model.reducer_group is not None
        if model.reducer_group is None:
            self._register()
        else:
            model.reducer_group.shares = self._share

    def _hook(self, hook: Callable[[Tensor], None]) -> None:
        self._handles = [p.register_post_accumulate_grad_hook(hook) for p in self._names]

    def _register(self) -> None:
        """From now on buckets come raw, through a hook."""
        assert self._model is not None

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own types
            return self._bucket(bucket)

        self._undecided = False
        if self._model.reducer_group is not None:
            self._model.reducer_group.shares = None
        torch.nn.parallel.DistributedDataParallel.register_comm_hook(self._model, None, hook)  # a subclass has its own

    def _decide(self) -> None:
        """The first gradient of the first step that is aggregated: nothing was copied yet, and weights are set."""
        self.begin()
        self._undecided, self._begun = False, True
        if inside_backward():
            at_end_of_backward(self._without_buckets)
        self.aggregator.wait()  # for the weights
        if self.aggregator.weights is not None or not self.aggregator.policy.takes_shares:
            self._register()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        # DDP cannot give a hook back, and its reducer, unseen by the garbage collector, holds the hook and so this.
        if self._model is not None:
            self._model.close()
        self._model = None
        self._names.clear()
        self._layouts.clear()
        self.touched.clear()
        if self._own_group is not None:
            dist.destroy_process_group(self._own_group)

    @contextmanager
    def join(self) -> Iterator[None]:
        assert self._model is not None, "hooks are on"
        if self._model.reducer_group is not None and self._model.reducer_group.shares is not None:
            self._register()  # a rank that is through weighs nothing
        with Join([self._model]):  # DDP shadows its own traffic and calls our hook with zeros
            yield
            self.aggregator.catch_up()
            self.aggregator.joined = True
        if self.running:
            self._finish()

    def _without_buckets(self) -> None:
        """The end of a backward that was taken for the first step's: there is none where DDP's forward was told so."""
        if self._begun:
            self.running = self._begun = False

    def _touch(self, parameter: Tensor) -> None:
        self.touched.append(parameter)
        refuse_reentrant()  # DDP's first hook may come too late to tell
        if self._undecided and self._model is not None and self._model.expects_backward:
            self._decide()

    def _bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's hook."""
        if bucket.index() == 0:
            self._first()
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise Unsupported(
                f"rank {self.aggregator.communicator.rank}: sparse gradients are taken by no policy. "
                "Use sparse=False in the Embedding."
            )
        future = future_of(buffer)
        piece = self._layouts.piece(bucket.parameters(), buffer, future, self.aggregator.policy)
        self._submit(piece, bucket.is_last())
        return future

    def _share(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """The all-reduce of DDP's reducer: a bucket that it has divided, the next one in order."""
        if self._undecided:  # this rank shadows the others, by torch's own join
            self._decide()
        if self._divided == 0:
            self._first()
        key = (self._divided, buffer.numel())
        layout = self._divided_layouts.get(key)
        if layout is None:  # the reducer does not say which parameters these are
            layout = self._divided_layouts[key] = Layout({f"elements from {self._divided}": buffer.shape})
        self._divided += buffer.numel()
        last = self._divided == self._numel
        if last:
            self._divided = 0
        future = future_of(buffer)
        self._submit(piece_of(layout, buffer, future, scaled=True), last)
        return future

    def _first(self) -> None:
        """A step's first bucket is here."""
        if inside_backward():
            finds_unused = self._model is not None and self._model.find_unused_parameters
            at_end_of_backward(self._finish if finds_unused else self._finish_after_ddp)
        elif self.running and not self._begun:
            self._finish()  # within join() buckets come outside of backward: the step before ends here
        if not self._begun:
            self.begin()
        self._begun = False

    def _submit(self, piece: Piece, last: bool) -> None:
        self._complete = last
        self.aggregator.submit(piece, last)
        if last:
            self.aggregator.driver.flush()
            if self.aggregator.joined:
                self.aggregator.end_ahead()

    def finished(self) -> None:
        # A parameter without a gradient keeps the last bucket back, and DDP hands nothing out before that comes.
        local = [] if self._complete else self.touched[:]
        super().finished()
        self.touched += local
        takes_hooks = self._first_step and all(p.requires_grad for p in self._names)  # a frozen one does not
        if takes_hooks and self.steps and not self._undecided:
            self._first_step = False  # so there is no more to it, and of many small parameters this is a cost
            for handle in self._handles:
                handle.remove()
            self._hook(self.touched.append)

    def _finish_after_ddp(self) -> None:
        at_end_of_backward(self._finish)  # DDP's callback stands already

    def _finish(self) -> None:
        try:
            self.aggregator.end()
        finally:
            self.finished()
