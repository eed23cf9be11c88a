"""Gradients from DistributedDataParallel.

Rules:

1. Where the policy is plain DDP's own mean, and nothing needs more, DDP's reducer aggregates by itself, and this module
   only sees steps begin and end. Weights, ``join()`` and HVDBRIDGE_DEBUG need more: then DDP gets a communication hook.
   A hook can be registered at any time, but not given back.
2. The first gradients that a forward's backward makes decide, on all ranks alike: only then weights are set, and
   nothing was copied into a bucket yet.
3. As in DDP the forward decides whether its backward aggregates, and one backward follows it that does.
4. DDP calls hooks strictly in bucket-index order, so they are handed on as they come.
5. The first step is one bucket, or cut in registered order, and rebuilt after it: layouts are looked up by the
   bucket's parameters.
6. DDP's engine callback takes over what has arrived while the rest travels, so ours, which waits for all, follows it.
   A failure leaves backward() through ours; DDP's futures get the buckets as they came then, for it would make another
   error of them. Where DDP waits for traffic of its own, too, which ranks that failed never send, ours comes first.
7. The scheduler is flushed with the last bucket: in the first step of a static graph DDP waits where it submits them.
8. DDP copies a dense parameter into its bucket in the order of its memory (channels_last), and a policy reads by index:
   such buckets are put in order and back, unless the policy treats every element alike.
9. DDP without its source is its module alone: autograd's hooks are off, and no forward sends anything.
10. Within ``join()`` forwards that accumulate or evaluate are the module's alone, as on MPI: ranks may make different
   numbers of them, and DDP's first one behind a step sends the order of buckets. Buffers are sent by us, and not by
   DDP, which would send them in evaluating forwards, too, where one rank alone would wait.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hvdbridge.errors import Unsupported
from hvdbridge.execution.scheduler import Traffic
from hvdbridge.policies.dense import bucket_mb, plain_mean
from hvdbridge.policy.base import Policy
from hvdbridge.policy.bucket import DDP_MB, FIRST_BUCKET_BYTES, Layout
from hvdbridge.reduction.aggregator import Aggregator, Piece
from hvdbridge.reduction.autograd import at_end_of_backward
from hvdbridge.reduction.parameters import sparse_gradient
from hvdbridge.reduction.source import SIZES, Options, Source
from hvdbridge.reduction.wrapper import Wrapper

JOIN = (
    "torch.distributed.algorithms.Join: its shadows make DDP's collectives, where a policy has others. Use "
    "sync.join(), or model.join() of hb.DistributedDataParallel; beside an optimizer whose state is sharded, give "
    "ranks padding."
)


Strided = tuple[int, torch.Size, tuple[int, ...]]

TORCHS: Any = torch.nn.parallel.DistributedDataParallel
"""Scripts may put hb.DistributedDataParallel in its place."""


class DistributedDataParallel(Wrapper, torch.nn.parallel.DistributedDataParallel):
    """DDP whose ``state_dict()`` has the bare module's keys; once closed, and in copies, it is its module alone.

    Attributes:
        source: is told of every forward whose backward the reducer will aggregate.
    """

    source: DdpSource | None = None
    takes_plain_keys = False  # as elsewhere, where a synchronizer's model is the user's own

    _closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Send nothing any more: gradients stay local."""
        self._closed = True
        # A forward may have told the reducer to expect a backward
        self._remove_autograd_hooks()  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._closed or self._sends_nothing():
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _sends_nothing(self) -> bool:
        """Within ``join()`` DDP counts all forwards: ranks would have to accumulate equal numbers (rule 10)."""
        if self.source is None or not self.source.aggregator.joining:
            return False
        gradients = torch.is_grad_enabled()
        if gradients and not self.require_backward_grad_sync:
            self.source.check_forward(False)
        return not (gradients and self.require_backward_grad_sync)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.source is None:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self.source.open_forward(self.require_backward_grad_sync)
        with self.source.aggregator.communicator.watch("what DDP itself sends before a forward (the order of buckets)"):
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        if self.source is not None and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.source.after_forward(output)
        return output

    def join_hook(self, **kwargs: Any) -> Any:
        """Refused: ``Join([...])`` of torch, whose shadows make DDP's collectives, and not those of a policy.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(JOIN)

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refused: what aggregates here is a policy.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(
            "register_comm_hook on the model of a GradientSynchronizer, whose gradients its policy aggregates. Give it "
            "policy=hb.from_comm_hook(state, hook)."
        )

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        self.register_comm_hook(None, comm_hook_type)

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, without our hook, and closed: a copy belongs to no synchronizer."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_comm_hooks": [], "source": None, "_closed": True}


class Layouts:
    """The layouts of DDP's buckets, by their parameters.

    DDP has a dense parameter in its bucket in the order of its memory, and a policy reads by index (rule 8). Such
    parameters are known by their offsets, shapes and strides.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self.names = names
        self._known: dict[tuple[int, ...], tuple[Layout, list[Strided]]] = {}

    def piece(
        self, parameters: Sequence[Tensor], buffer: Tensor, future: torch.futures.Future[Tensor], policy: Policy
    ) -> Piece:
        """A bucket for ``policy``; ``future`` gets what DDP waits for: the update, or after a failure the bucket as it
        came (rule 6)."""
        key = tuple(map(id, parameters))
        if key not in self._known:
            self._known[key] = self.look(parameters)
        layout, strided = self._known[key]
        views = []  # of a strided parameter, in the order of its memory, and by index
        for offset, shape, stride in () if plain_mean(policy) else strided:
            part = buffer[offset : offset + shape.numel()]
            views.append((part.as_strided(shape, stride), part.view(shape)))
        for in_memory, by_index in views:
            by_index.copy_(in_memory.clone())

        def deliver(update: Tensor | None) -> None:
            if update is not None and views:  # not in the update itself, which may be part of the policy's state
                update = buffer.copy_(update)
                for in_memory, by_index in views:
                    in_memory.copy_(by_index.clone())
            elif update is not None and update.storage_offset() != 0:
                update = update.clone()  # DDP looks at the storage from its beginning
            if not future.done():  # by an update, and then another piece of its flow failed
                future.set_result(buffer if update is None else update)

        return Piece(layout, buffer, deliver)

    def look(self, parameters: Sequence[Tensor]) -> tuple[Layout, list[Strided]]:
        """At a bucket that was not seen before."""
        layout = Layout({self.names[p]: p.shape for p in parameters})
        strided = [
            (layout.offsets[self.names[p]], p.shape, p.stride())
            for p in parameters
            if not p.is_contiguous() and torch.empty_like(p, device="meta").stride() == p.stride()  # i.e. it is dense
        ]
        return layout, strided


def future_of(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Of what becomes of ``buffer``."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


@contextmanager
def ddp_ignores(model: Module, names: Collection[str]) -> Iterator[None]:
    """Within, DDP is constructed without the parameters and buffers of these names."""
    key, attributes = "_ddp_params_and_buffers_to_ignore", vars(model)
    before = attributes.get(key)
    # It puts a dot before the names of the outermost module's own parameters, and not of its buffers
    attributes[key] = [*names, *(f".{name}" for name in names)]
    try:
        yield
    finally:
        if before is None:
            del attributes[key]
        else:
            attributes[key] = before


def ddp_options(params: Mapping[str, Tensor], policy: Policy, options: Options) -> dict[str, Any]:
    """DDP's own options, by ours."""
    known = signature(TORCHS).parameters
    sends_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before 2.13
    given: dict[str, Any] = {
        sends_buffers: False,  # we send them, but within join()
        "find_unused_parameters": options.find_unused_parameters and not options.static_graph,  # join() goes by it
        "static_graph": options.static_graph,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
        # None: a small first bucket. A list of sizes makes one, too. Where buckets of the mean have a size that the
        # user said, they are those of a DDP of that size, and so are their sums' bits.
        "bucket_cap_mb": None if options.bucket_mb == DDP_MB else options.bucket_mb,
    }
    if "init_sync" in known:  # older torch copies from rank 0 once more
        given["init_sync"] = False
    as_ddps = options.bucket_mb == DDP_MB or (options.said and bucket_mb(policy) == DDP_MB)
    if options.whole:
        given["bucket_cap_mb"] = 1 + sum(p.nbytes for p in params.values()) / 2**20
    elif SIZES and not options.static_graph and not as_ddps:
        given["bucket_cap_mb_list"] = [min(FIRST_BUCKET_BYTES / 2**20, options.bucket_mb), options.bucket_mb]
    return given


class DdpSource(Source):
    """Feeds an :class:`Aggregator` from a DDP module, with our communication hook where DDP's own mean is not enough.
    What DDP sends itself goes through the default process group, or one over the ranks of the aggregator's group."""

    def __init__(
        self, model: Module, optimizers: list[Optimizer], params: Mapping[str, Parameter], aggregator: Aggregator,
        options: Options,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizers, params, aggregator, options)
        ranks, communicator = aggregator.ranks, aggregator.communicator
        limit = timedelta(seconds=communicator.timeout_seconds)
        self._own_group = None if ranks is None else dist.new_group(ranks, limit, use_local_synchronization=True)
        wrapped = options.wrapper
        if wrapped is None:
            wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
        given = ddp_options(params, aggregator.policy, options)
        try:
            with ddp_ignores(model, options.ignored):
                DistributedDataParallel.__init__(wrapped, model, process_group=self._own_group, **given)
        except BaseException:
            self.stop()
            raise
        self.model = wrapped
        self._layouts = Layouts(self.names)
        self._whole = False  # the step's last bucket came
        self._dropped: list[Tensor] = []  # whose gradients hooks of the user dropped in this backward
        self.unmarked = 0  # buckets of the first step, of which DDP marks none as the last (``_set_static_graph()``)
        self._waiting = ExitStack()
        self._since = self._seconds = 0.0
        self._before = 0  # parameters that were touched before the step began
        # DDP's reducer may aggregate by itself (rule 1)
        plain = plain_mean(aggregator.policy) and not aggregator.weighted and not aggregator.scheduler.checks
        self._plain = plain
        wrapped.source = self
        self._handles = [p.register_post_accumulate_grad_hook(self._gradient) for p in params.values()]
        if plain:
            aggregator.traffic_elsewhere = self._ddp_traffic
        else:
            self._register()

    def _register(self) -> None:
        """From now on buckets come through a hook."""

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own types
            return self._bucket(bucket)

        self._plain = False
        self.aggregator.traffic_elsewhere = None
        TORCHS.register_comm_hook(self.model, None, hook)  # a subclass has its own

    def after_forward(self, output: Any) -> None:
        """A forward has told the reducer to aggregate in the backward that follows."""
        if self.find_unused:
            self.outputs(output)
        self.expected = True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.stop()
        # DDP cannot give a hook back, and its reducer, unseen by the garbage collector, holds the hook and so this.
        if self.model is not None:
            if self._plain:
                self.aggregator.last_traffic, self.aggregator.traffic_elsewhere = self._ddp_traffic(), None
            self.model.source = None
            self.model.close()
        self.model = None
        self._waiting.close()
        self.names.clear()
        self._layouts = Layouts({})
        self.touched.clear()
        if self._own_group is not None:
            dist.destroy_process_group(self._own_group)
            self._own_group = None

    @contextmanager
    def join(self) -> Iterator[None]:
        if self._plain:
            self._register()  # a rank that is through weighs nothing
        with super().join():
            yield

    def shadow(self) -> None:
        """As torch's own shadows of DDP: its traffic, and our hook with zeros."""
        model: Any = self.model
        model.reducer._rebuild_buckets()
        model._match_all_reduce_for_bwd_pass()
        if self.find_unused:
            model._match_unused_params_allreduce()
        model.reducer._push_all_rebuilt_params()
        self.aggregator.end()
        self._whole = False
        self.finished()

    # -- A step ----------------------------------------------------------------------------------------------------

    def _gradient(self, parameter: Tensor) -> None:
        """A parameter's gradient is there, and comes to DDP's reducer next."""
        aggregates = self.takes(parameter)
        self.touched.append(parameter)
        if not (aggregates and (self.steps == 0 or self.find_unused)):
            return
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise sparse_gradient(self._where, self.names[parameter])

    def begin_step(self) -> None:
        """Within backward, before its first gradient comes to DDP's reducer."""
        self._before = len(self.touched)
        at_end_of_backward(self._end_of_backward)
        self.begin()
        if self._plain and self.steps == 0:
            self.aggregator.wait()  # for the weights
            if self.aggregator.weights is not None or not plain_mean(self.aggregator.policy):
                self._register()

    def _bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's hook."""
        if not self.running:
            self.open_backward()
        buffer = bucket.buffer()
        future = future_of(buffer)
        piece = self._layouts.piece(bucket.parameters(), buffer, future, self.aggregator.policy)
        self.unmarked -= 1
        self._whole = bucket.is_last() or self.unmarked == 0
        self.aggregator.submit(piece, self._whole)
        if self._whole:
            self.aggregator.scheduler.flush()
        return future

    def _end_of_backward(self) -> None:
        """All gradients are there. DDP's own callback, which follows, takes over what has arrived, and waits."""
        self._dropped = [p for p in self.touched[self._before :] if p.grad is None]
        if self._whole and self.find_unused:
            self._finish()
            return
        if self._plain:
            self._waiting.enter_context(self.aggregator.communicator.watch("DDP's all-reduces of gradients"))
            self._since = time.perf_counter()
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        try:
            self._waiting.close()
            if self._plain:
                with suppress(RuntimeError):  # DDP's reducer is not through
                    self.model.reducer._check_reducer_finalized()
                    self._whole, self._seconds = True, time.perf_counter() - self._since
            self.check_kept(self._dropped)
            self._check_complete()
            self.check_unchanged()
            buffers = None if self.aggregator.joining else self.send_buffers()
            self.aggregator.end()
            self.await_buffers(buffers)
        finally:
            self._whole = False
            self.finished()

    def _check_complete(self) -> None:
        """
        Raises:
            StepError: DDP's reducer waits for gradients that this backward did not make.
        """
        if self.static_graph and (self._static is None or not self._whole):
            self.check_static(set(self.touched[self._before :]))
        if not self._whole:
            raise self.incomplete(set(self.touched[self._before :]))

    def _ddp_traffic(self) -> Traffic:
        """What DDP's own all-reduces of the last step sent; the seconds are those that backward waited for them."""
        if self.steps == 0:
            return Traffic()
        self.model.logger.set_runtime_stats_and_log()  # else it tells of rebuilt buckets one step later
        data = self.model._get_ddp_logging_data()
        sizes = [int(size) for size in data.get("rebuilt_bucket_sizes", data["bucket_sizes"]).split(",")]
        ranks = self.aggregator.communicator.size
        return Traffic(len(sizes), sum(2 * size * (ranks - 1) // ranks for size in sizes), self._seconds)
