"""DdpSource: gradients from torch's DistributedDataParallel.

Rules:

1. If the policy is DDP's own mean, DDP's reducer aggregates, and this module only detects the start and end of steps.
   Weights, ``join()`` and HVDBRIDGE_DEBUG need a communication hook. A hook can be registered at any time, but not
   removed.
2. Ranks that use weights register the hook at the first gradient of the first backward. The weights are set by then,
   and no gradient has been copied into a bucket yet. The exchange of weights makes all ranks decide alike.
3. As in DDP the forward decides whether its backward aggregates, and only the first backward after it does.
4. DDP calls hooks strictly in bucket-index order, so the hook submits buckets as they come.
5. DDP's buckets of the first step differ from those of later steps, so layouts are looked up by a bucket's parameters.
6. Our engine callback, which waits for all flows, runs after DDP's, which copies each update while other buckets are in
   flight. If a flow failed, our callback raises the error from backward(). The futures then return the buckets' own
   buffers, because DDP would raise another error first. With ``find_unused_parameters`` DDP's callback also waits for a
   collective of its own, which a failed rank never starts. So our callback runs first there.
7. The last bucket flushes the scheduler, because DDP waits within that hook in the first step of a static graph.
8. DDP copies a dense parameter into its bucket in memory order (channels_last), but policies read in index order. Such
   parameters are reordered before and after the policy, unless the policy treats all elements alike.
9. A closed DDP only calls its module: its autograd hooks are removed, and no forward communicates.
10. Within ``join()`` a forward that accumulates or evaluates only calls the module. Ranks may run different numbers of
   these, but DDP's first forward after a step broadcasts the bucket order. DdpSource broadcasts buffers, because DDP
   would do so in evaluating forwards, too, where one rank alone would wait.
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
from hvdbridge.reduction.aggregator import Aggregator, SourceBucket
from hvdbridge.reduction.autograd import at_end_of_backward
from hvdbridge.reduction.parameters import sparse_gradient
from hvdbridge.reduction.source import DDP_HAS_SIZE_LIST, Options, Source
from hvdbridge.reduction.wrapper import Wrapper

JOIN_MESSAGE = (
    "torch.distributed.algorithms.Join: its shadows make DDP's collectives, where a policy has others. Use "
    "sync.join(), or model.join() of hb.DistributedDataParallel; beside an optimizer whose state is sharded, give "
    "ranks padding."
)


Strided = tuple[int, torch.Size, tuple[int, ...]]  # a parameter's offset in its bucket, shape and stride

TORCH_DDP: Any = torch.nn.parallel.DistributedDataParallel
"""torch's class, kept here because scripts may assign hb.DistributedDataParallel to its name."""


class DistributedDataParallel(Wrapper, torch.nn.parallel.DistributedDataParallel):
    """DDP whose ``state_dict()`` has the bare module's keys. Closed ones and copies only call their module.

    Attributes:
        source: the source that learns of every forward, and after it whether the reducer will aggregate its backward.
    """

    source: DdpSource | None = None
    takes_plain_keys = False  # as on other backends, where ``sync.model`` is the user's own module

    _closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Stop all communication; gradients stay local from now on."""
        self._closed = True
        # After a forward the reducer expects a backward
        self._remove_autograd_hooks()  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._closed or self._calls_module_only():
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _calls_module_only(self) -> bool:
        """Check a forward within ``join()``; return whether it accumulates or evaluates (rule 10)."""
        if self.source is None or not self.source.aggregator.joining:
            return False
        gradients = torch.is_grad_enabled()
        if gradients and not self.require_backward_grad_sync:
            self.source.check_forward(False)
        return not (gradients and self.require_backward_grad_sync)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.source is None:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self.source.begin_forward(self.require_backward_grad_sync)
        with self.source.aggregator.communicator.watch("what DDP itself sends before a forward (the order of buckets)"):
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        if self.source is not None and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.source.after_forward(output)
        return output

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuse torch's ``Join([...])``: a shadow runs DDP's collectives, but a policy may run others.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(JOIN_MESSAGE)

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refuse communication hooks, because a policy aggregates the gradients.

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
        """Return torch's state without our hook, and closed: a copy belongs to no synchronizer."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_comm_hooks": [], "source": None, "_closed": True}


class BucketLayouts:
    """Cache of the layouts of DDP's buckets, by their parameters.

    A layout comes with the offsets, shapes and strides of the parameters that rule 8 reorders.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self.names = names
        self._cache: dict[tuple[int, ...], tuple[Layout, list[Strided]]] = {}

    def bucket(
        self, parameters: Sequence[Tensor], buffer: Tensor, future: torch.futures.Future[Tensor], policy: Policy
    ) -> SourceBucket:
        """Return the source bucket of one of DDP's buckets.

        Its ``deliver`` completes ``future`` with the update, or after a failure with ``buffer`` (rule 6).
        """
        key = tuple(map(id, parameters))
        if key not in self._cache:
            self._cache[key] = self.make_layout(parameters)
        layout, strided = self._cache[key]
        views = []  # of each strided parameter: in memory order, and in index order
        for offset, shape, stride in () if plain_mean(policy) else strided:
            part = buffer[offset : offset + shape.numel()]
            views.append((part.as_strided(shape, stride), part.view(shape)))
        for in_memory_order, in_index_order in views:
            in_index_order.copy_(in_memory_order.clone())

        def deliver(update: Tensor | None) -> None:
            if update is not None and views:  # reorder in the buffer: the update may belong to the policy's state
                update = buffer.copy_(update)
                for in_memory_order, in_index_order in views:
                    in_memory_order.copy_(in_index_order.clone())
            elif update is not None and update.storage_offset() != 0:
                update = update.clone()  # DDP reads from the start of the storage
            if not future.done():  # completed by an update before a later part of its flow failed
                future.set_result(buffer if update is None else update)

        return SourceBucket(layout, buffer, deliver)

    def make_layout(self, parameters: Sequence[Tensor]) -> tuple[Layout, list[Strided]]:
        """Return the layout of a new bucket, and its dense parameters that are not contiguous."""
        layout = Layout({self.names[p]: p.shape for p in parameters})
        strided = [
            (layout.offsets[self.names[p]], p.shape, p.stride())
            for p in parameters
            if not p.is_contiguous() and torch.empty_like(p, device="meta").stride() == p.stride()  # dense
        ]
        return layout, strided


def bucket_future(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future for the update of ``buffer``, on its device."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


@contextmanager
def ddp_ignores(model: Module, names: Collection[str]) -> Iterator[None]:
    """Within the block, a DDP of ``model`` is constructed without the parameters and buffers in ``names``."""
    key, attributes = "_ddp_params_and_buffers_to_ignore", vars(model)
    previous = attributes.get(key)
    # DDP prepends a dot to names of the outermost module's own parameters, but not to names of its buffers
    attributes[key] = [*names, *(f".{name}" for name in names)]
    try:
        yield
    finally:
        if previous is None:
            del attributes[key]
        else:
            attributes[key] = previous


def ddp_options(params: Mapping[str, Tensor], policy: Policy, options: Options) -> dict[str, Any]:
    """Return the keyword arguments of torch's DDP for ``options``."""
    accepted = signature(TORCH_DDP).parameters
    buffers_option = "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"  # < 2.13
    arguments: dict[str, Any] = {
        buffers_option: False,  # DdpSource broadcasts them (rule 10)
        "find_unused_parameters": options.find_unused_parameters and not options.static_graph,  # DDP's join reads it
        "static_graph": options.static_graph,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
        # With None, or a list of sizes, DDP has a small first bucket. If the user gave a size for the mean, the buckets
        # are those of a DDP with this size, so that the sums have the same bits.
        "bucket_cap_mb": None if options.bucket_mb == DDP_MB else options.bucket_mb,
    }
    if "init_sync" in accepted:  # older versions of torch copy from rank 0 once more
        arguments["init_sync"] = False
    same_as_ddp = options.bucket_mb == DDP_MB or (options.explicit_size and bucket_mb(policy) == DDP_MB)
    if options.single_bucket:
        arguments["bucket_cap_mb"] = 1 + sum(p.nbytes for p in params.values()) / 2**20
    elif DDP_HAS_SIZE_LIST and not options.static_graph and not same_as_ddp:
        arguments["bucket_cap_mb_list"] = [min(FIRST_BUCKET_BYTES / 2**20, options.bucket_mb), options.bucket_mb]
    return arguments


class DdpSource(Source):
    """Feeds an :class:`Aggregator` from a DDP module; registers a communication hook unless DDP's own mean suffices.

    DDP's own collectives use the default process group, or one over the ranks of the aggregator's group.
    """

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
        arguments = ddp_options(params, aggregator.policy, options)
        try:
            with ddp_ignores(model, options.ignored):
                DistributedDataParallel.__init__(wrapped, model, process_group=self._own_group, **arguments)
        except BaseException:
            self.stop()
            raise
        self.model = wrapped
        self._layouts = BucketLayouts(self.names)
        self._all_submitted = False  # the last bucket of the step was submitted, or DDP's reducer has finished
        self._dropped: list[Tensor] = []  # parameters whose gradients hooks of the user removed in this backward
        self.unmarked_buckets = 0  # buckets of the first step left, if DDP marks none as the last (_set_static_graph())
        self._watching = ExitStack()
        self._wait_started = self._wait_seconds = 0.0
        self._accumulated_before = 0  # length of `accumulated` when the step began
        # DDP's reducer aggregates, if nothing needs a hook (rule 1)
        ddp_aggregates = plain_mean(aggregator.policy) and not aggregator.weighted and not aggregator.scheduler.checks
        self._ddp_aggregates = ddp_aggregates
        wrapped.source = self
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in params.values()]
        if ddp_aggregates:
            aggregator.external_traffic = self._ddp_traffic
        else:
            self._register_hook()

    def _register_hook(self) -> None:
        """Register a communication hook: from now on the policy aggregates DDP's buckets."""

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own types
            return self._bucket(bucket)

        self._ddp_aggregates = False
        self.aggregator.external_traffic = None
        TORCH_DDP.register_comm_hook(self.model, None, hook)  # subclasses override it

    def after_forward(self, output: Any) -> None:
        """Expect a backward that aggregates, after a forward that prepared DDP's reducer for it."""
        if self.find_unused:
            self.output_tensors(output)
        self.backward_expected = True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.stop()
        # The garbage collector cannot traverse DDP's reducer, whose hook keeps this source alive: release its contents
        if self.model is not None:
            if self._ddp_aggregates:
                self.aggregator.last_traffic, self.aggregator.external_traffic = self._ddp_traffic(), None
            self.model.source = None
            self.model.close()
        self.model = None
        self._watching.close()
        self.names.clear()
        self._layouts = BucketLayouts({})
        self.accumulated.clear()
        if self._own_group is not None:
            dist.destroy_process_group(self._own_group)
            self._own_group = None

    @contextmanager
    def join(self) -> Iterator[None]:
        if self._ddp_aggregates:
            self._register_hook()  # a rank that shadows others needs weight 0
        with super().join():
            yield

    def shadow(self) -> None:
        """Run DDP's own collectives as torch's ``Join`` does, and end the step of the hook with zeros."""
        model: Any = self.model
        model.reducer._rebuild_buckets()
        model._match_all_reduce_for_bwd_pass()
        if self.find_unused:
            model._match_unused_params_allreduce()
        model.reducer._push_all_rebuilt_params()
        self.aggregator.end()
        self._all_submitted = False
        self.end_step()

    # -- one step --------------------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: Tensor) -> None:
        """Post-accumulate-grad hook; it runs before DDP's reducer gets the gradient."""
        aggregates = self.backward_aggregates(parameter)
        self.accumulated.append(parameter)
        if not (aggregates and (self.steps == 0 or self.find_unused)):
            return
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise sparse_gradient(self._where, self.names[parameter])

    def begin_step(self) -> None:
        """Begin a step before DDP's reducer gets the first gradient."""
        self._accumulated_before = len(self.accumulated)
        at_end_of_backward(self._end_of_backward)
        self.begin_aggregation()
        if self._ddp_aggregates and self.steps == 0:
            self.aggregator.wait()  # for the exchange of weights
            if self.aggregator.weights is not None or not plain_mean(self.aggregator.policy):
                self._register_hook()

    def _bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: submit the bucket, and return a future for its update."""
        if not self.running:
            self.begin_backward()
        buffer = bucket.buffer()
        future = bucket_future(buffer)
        source_bucket = self._layouts.bucket(bucket.parameters(), buffer, future, self.aggregator.policy)
        self.unmarked_buckets -= 1
        self._all_submitted = bucket.is_last() or self.unmarked_buckets == 0
        self.aggregator.submit(source_bucket, self._all_submitted)
        if self._all_submitted:
            self.aggregator.scheduler.flush()
        return future

    def _end_of_backward(self) -> None:
        """Engine callback at the end of backward; DDP's callback runs next and waits for the buckets (rule 6)."""
        self._dropped = [p for p in self.accumulated[self._accumulated_before :] if p.grad is None]
        if self._all_submitted and self.find_unused:
            self._finish()
            return
        if self._ddp_aggregates:
            self._watching.enter_context(self.aggregator.communicator.watch("DDP's all-reduces of gradients"))
            self._wait_started = time.perf_counter()
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        try:
            self._watching.close()
            if self._ddp_aggregates:
                with suppress(RuntimeError):  # DDP's reducer has not finished
                    self.model.reducer._check_reducer_finalized()
                    self._all_submitted, self._wait_seconds = True, time.perf_counter() - self._wait_started
            self.check_dropped(self._dropped)
            self._check_complete()
            self.check_unchanged()
            buffers = None if self.aggregator.joining else self.send_buffers()
            self.aggregator.end()
            self.await_buffers(buffers)
        finally:
            self._all_submitted = False
            self.end_step()

    def _check_complete(self) -> None:
        """Check that DDP's reducer got every gradient that it expects.

        Raises:
            StepError: this backward did not produce all of them.
        """
        if self.static_graph and (self._static_params is None or not self._all_submitted):
            self.check_static(set(self.accumulated[self._accumulated_before :]))
        if not self._all_submitted:
            raise self.incomplete_error(set(self.accumulated[self._accumulated_before :]))

    def _ddp_traffic(self) -> Traffic:
        """Return the traffic of DDP's own all-reduces in the last step; the seconds are backward's wait for them."""
        if self.steps == 0:
            return Traffic()
        self.model.logger.set_runtime_stats_and_log()  # else the logged sizes are those before DDP rebuilt its buckets
        logged = self.model._get_ddp_logging_data()
        sizes = [int(size) for size in logged.get("rebuilt_bucket_sizes", logged["bucket_sizes"]).split(",")]
        ranks = self.aggregator.communicator.size
        return Traffic(len(sizes), sum(2 * size * (ranks - 1) // ranks for size in sizes), self._wait_seconds)
