"""Source, the base class of gradient sources: it submits a backward's gradients to an aggregator as one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import pairwise
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parallel.distributed import _find_tensors
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdbridge.deprecated import own_member
from hvdbridge.errors import StepError, Unsupported
from hvdbridge.execution.flow import Submission
from hvdbridge.policies.dense import bucket_mb
from hvdbridge.policy.base import BYTEWISE_MB, CODED_MB, NCCL_MB, Policy
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.autograd import inside_backward, refuse_compiled_autograd, refuse_reentrant
from hvdbridge.reduction.parameters import ParameterWatch, quoted
from hvdbridge.reduction.replicate import broadcast_tensors


@dataclass(frozen=True)
class Options:
    """Options of a source, as compared across ranks; see ``GradientSynchronizer``.

    Attributes:
        explicit_size: the user gave the bucket size.
        single_bucket: put all gradients of one dtype and device into one bucket. Set for policies of scope "step",
            which wait for the last gradient anyway and would have to concatenate several buckets.
        ignored: names of the parameters and buffers to leave out.
        wrapper: the wrapper through which the user's module is trained (``hb.DistributedDataParallel``), or None.
    """

    bucket_mb: float
    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False
    explicit_size: bool = False
    single_bucket: bool = False
    ignored: tuple[str, ...] = field(default=(), repr=False)  # not compared: ranks may ignore different names
    wrapper: Any = field(default=None, repr=False)

    @property
    def bucket_bytes(self) -> float:
        return math.inf if self.single_bucket else self.bucket_mb * 2**20


DDP_HAS_SIZE_LIST = "bucket_cap_mb_list" in signature(torch.nn.parallel.DistributedDataParallel).parameters
"""True if DDP supports a small first bucket with any size of the others (``bucket_cap_mb_list``, torch >= 2.13). With a
static graph it is not used: DDP marks every bucket of the first step as the first, and none as the last."""


def default_bucket_mb(
    policy: Policy, nodes: Iterable[int], blocks_host: bool = True, static_graph: bool = False
) -> float:
    """Return the bucket size in MiB to use if the user gives none; equal on all ranks.

    It is the policy's default (:func:`~hvdbridge.policies.dense.bucket_mb`). Among several nodes it is at most
    :data:`CODED_MB`, or :data:`BYTEWISE_MB` for :attr:`bytewise <hvdbridge.Policy.bytewise>` policies, unless DDP could
    not have a small first bucket then. On slow networks a large bucket delays the first send. Smaller buckets are not
    faster within one machine, nor for policies that send less than a byte per element. Under NCCL every bucket costs
    the host milliseconds in which it enqueues the policy's operations, so buckets that are encoded have
    :data:`NCCL_MB`.

    Args:
        nodes: the node number of each rank, equal for ranks of one node; empty: unknown.
        blocks_host: False for NCCL (:class:`.Capabilities`).

    >>> from hvdbridge.policies import from_spec
    >>> specs = ("mean", "topk", "ef(int8)")
    >>> [default_bucket_mb(from_spec(spec), nodes) for spec in specs for nodes in ((0, 0), (0, 1))]
    [25.0, 10.0, 10.0, 10.0, 10.0, 5.0]
    >>> [default_bucket_mb(from_spec(spec), (0, 1), blocks_host=False) for spec in specs]
    [25.0, 100.0, 100.0]
    >>> specs = ("bf16", "bf16(topk)", "hierarchical(fp8)", "local_sgd(inner=int8)", "mean:exact=true", "fp16(median)")
    >>> [from_spec(spec).bytewise for spec in specs]
    [True, False, True, False, True, True]
    """
    several = any(node != following for node, following in pairwise(nodes))
    if not blocks_host:
        coded = bucket_mb(policy) == CODED_MB and own_member(policy, "bucket_mb", warn=False) is None
        return NCCL_MB if coded else bucket_mb(policy)
    if not several or not DDP_HAS_SIZE_LIST or static_graph:
        return bucket_mb(policy)
    return min(bucket_mb(policy), BYTEWISE_MB if policy.bytewise else CODED_MB)


LARGE_PARAMETER_BYTES = 1 << 20
"""Average size of a parameter in bytes above which bucket views cost more on a CPU than they save."""


def prefer_bucket_views(params: Iterable[Tensor]) -> bool:
    """Return whether ``p.grad`` should be a view of a bucket: on CUDA always, on a CPU if parameters are small.

    With views the gradient that backward allocated is freed at once. C libraries return large blocks to the operating
    system, and the next backward then pays for page faults, which cost more than copies do.
    """
    sizes = [p.numel() * p.element_size() for p in params if p.device.type == "cpu"]
    return sum(sizes) <= LARGE_PARAMETER_BYTES * len(sizes)


_version: Callable[[Any], int] = attrgetter("_version")
_sources: WeakSet[Source] = WeakSet()


def closure_of(args: Any, kwargs: Any) -> Any:
    """Return the closure passed to ``optimizer.step``, from the arguments of a step hook; None: there is none."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check the step of any optimizer in this process. A step with a closure computes its gradients later."""
    for source in [s for s in _sources if s.accumulated or s.running or s.backward_expected]:
        if closure_of(args, kwargs) is None:
            source.before_step(optimizer)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_any_step)


def mark_aggregated(parameters: Set[Tensor]) -> None:
    """Record that ``parameters`` were aggregated elsewhere, so that no other source reports their gradients."""
    for source in _sources:
        if source.accumulated:
            source.accumulated = [p for p in source.accumulated if p not in parameters]


def front_end(name: str) -> Callable[..., Source]:
    """Import and return the source class that a backend names as its ``front_end``, a key of :data:`FRONT_ENDS`."""
    module, _, attribute = FRONT_ENDS[name].partition(":")
    source_class: Callable[..., Source] = getattr(import_module(f"hvdbridge.reduction.{module}"), attribute)
    return source_class


FRONT_ENDS = {"ddp": "ddp:DdpSource", "hooks": "hooks:HookSource", "horovod": "horovod_optimizer:HorovodSource"}
"""Source classes as ``module:class``; see :class:`hvdbridge.backends.registry.Backend`."""


class Source:
    """Base class: detects forwards and backwards that aggregate, checks them, and broadcasts buffers.

    Args:
        model: the user's module.
        optimizers: the user's optimizers.
        params: the parameters to aggregate, by name.

    Attributes:
        model, optimizers: the objects to train with; a source may replace those that the user gave.
        synchronizing: False within ``no_sync()``: forwards and their backwards only accumulate.
        backward_expected: a forward that aggregates has run; its backward has not begun.
        running: a backward that aggregates has begun and not ended.
        accumulated: parameters that accumulated a local gradient since the last aggregation, once per gradient.
        steps: number of completed backwards of this rank that aggregated.
        buffer_root: the rank whose buffers are broadcast: 0, within ``join()`` the last rank that still has data.
        names: parameter -> name.
        parameter_watch: detects that parameters of the model were replaced or added.
        on_first_step: called once when the first step has ended; may be None.
    """

    on_first_step: Callable[[], None] | None = None

    def __init__(
        self, model: Module, optimizers: list[Optimizer], params: Mapping[str, Parameter], aggregator: Aggregator,
        options: Options,
    ) -> None:  # fmt: skip
        self.model: Any = model
        self.optimizers, self.aggregator = optimizers, aggregator
        self.names: dict[Tensor, str] = {p: name for name, p in params.items()}
        self.parameter_watch = ParameterWatch(model, params, options.ignored)
        # A forward renormalizes these in place, also when it is recomputed within backward
        renormalized = {
            module.weight for module in model.modules()
            if isinstance(module, Embedding | EmbeddingBag) and module.max_norm is not None
        }  # fmt: skip
        self._version_checked = [p for p in self.names if p not in renormalized]
        self._versions: list[int] = []  # version counters of _version_checked at the start of this backward
        self._accumulating = False  # the last forward was within no_sync()
        self.find_unused = options.find_unused_parameters and not options.static_graph
        self.static_graph = options.static_graph
        self._static_params: Set[Tensor] | None = None  # static graph: parameters with a gradient in the first step
        self.synchronizing = True
        self.backward_expected = self.running = False
        self._graph_task_id = -1
        self.buffer_root = 0
        # Modules whose buffers are broadcast, not their buffers: a forward may assign new ones
        self._modules = dict(model.named_modules()) if options.broadcast_buffers else {}
        self._ignored = {tuple(name.rpartition(".")[::2]) for name in options.ignored}  # (module name, buffer name)
        self.accumulated: list[Tensor] = []
        self.steps = 0
        _sources.add(self)
        _watch_optimizers()

    def send_buffers(self) -> Submission[None] | None:
        """Start a broadcast of rank :attr:`buffer_root`'s buffers to all ranks; None if there are no buffers.

        The broadcast is the last operation of each step, so that a later forward sends nothing and one rank may
        evaluate alone. As in DDP, a second forward before the backward broadcasts again, since the first may have
        changed the buffers. Call this before ``aggregator.end()``, whose background flows would delay the broadcast.
        """
        buffers = {
            id(buffer): buffer
            for prefix, module in self._modules.items()
            for name, buffer in module._buffers.items()
            if buffer is not None and (prefix, name) not in self._ignored
        }
        if not buffers:
            return None
        flow = broadcast_tensors(buffers.values(), self.buffer_root)
        return self.aggregator.scheduler.submit(Submission(flow, self.aggregator.communicator))

    def await_buffers(self, pending: Submission[None] | None) -> None:
        """Wait for the broadcast that :meth:`send_buffers` started."""
        if pending is not None:
            pending.wait()
            self.aggregator.scheduler.order()  # the next forward reads them

    def stop(self) -> None:
        """Stop checking steps of optimizers, and do not aggregate later backwards."""
        self.backward_expected = False
        self.parameter_watch.close()
        _sources.discard(self)

    @property
    def _where(self) -> str:
        return f"rank {self.aggregator.communicator.rank}"

    def before_forward(self) -> None:
        """Hook of a wrapper, called before each forward of its module."""

    def after_forward(self, output: Any) -> None:
        """Hook of a wrapper, called after each forward with the module's output."""

    def output_tensors(self, output: Any) -> list[Tensor]:
        """Return all tensors in a forward's output; ``find_unused_parameters`` traverses the graph from them.

        Raises:
            StepError: the output contains no tensor.
        """
        tensors: list[Tensor] = list(_find_tensors(output))
        if not tensors:
            raise StepError(
                f"{self._where}: find_unused_parameters=True looks for tensors in what the forward returns, and there "
                f"are none in {type(output).__name__}. Return them in a tuple, list, dict or dataclass."
            )
        return tensors

    def begin_forward(self, aggregates: bool) -> None:
        """Check a forward before it runs, and broadcast buffers if it must.

        Args:
            aggregates: the backward of this forward aggregates.

        Raises:
            StepError: see :meth:`check_forward`; or other ranks do not run this forward.
        """
        if not torch.is_grad_enabled():
            return
        self.check_forward(aggregates)
        # A second forward before the backward: the first may have changed buffers
        again = self.backward_expected and any(m._buffers for m in self._modules.values()) and not inside_backward()
        if aggregates and (self.aggregator.joining or again):
            # If the other ranks run no forward, the exchange raises an error before buffers are sent as gradients
            self._exchange_forward_flags()
            self.await_buffers(self.send_buffers())

    def _exchange_forward_flags(self) -> bool:
        """Exchange whether each rank still has data; False if none has. Collective.

        Within ``join()``, as in DDP, the last rank with data becomes :attr:`buffer_root`.
        """
        flags = self.aggregator.exchange_forward_flags(not self.aggregator.joined)
        with_data = [rank for rank, flag in enumerate(flags) if flag]
        if with_data and self.aggregator.joining:
            self.buffer_root = with_data[-1]
        return bool(with_data)

    def check_forward(self, synchronizing: bool) -> None:
        """Check a forward that records gradients.

        Raises:
            StepError: an earlier backward did not end, the model's parameters were replaced, or the first step of a
                static graph would not aggregate.
            BaseException: the failure of an earlier step.
        """
        if synchronizing:
            self.aggregator.scheduler.check_failure()
        if self.running and not inside_backward():
            raise self.unfinished_error()
        refuse_compiled_autograd()
        if synchronizing:
            self.parameter_watch.check(f"{self._where}: forward")
        elif self.static_graph and self.steps == 0:
            raise StepError(
                f"{self._where}: with static_graph=True the first backward of all must aggregate. Make one step "
                "without no_sync(), or leave out static_graph=True."
            )
        self._accumulating = not synchronizing

    def check_unaggregated(self, when: str, params: set[Tensor] | None = None) -> None:
        """Check that ``params`` (None: all) have no unaggregated gradients; ``when`` names the operation.

        Raises:
            StepError: some of them have nonzero gradients that were never aggregated.
        """
        held = set(self.accumulated) if params is None else params.intersection(self.accumulated)
        lost = [p for p in self.names if p in held and p.grad is not None and p.grad.any()]
        if lost:
            raise StepError(
                f"{self._where}: {when} with gradients of {len(lost)} parameters that were never aggregated: "
                f"{quoted(self.names[p] for p in lost)}. A backward aggregates if it is the first one after a forward "
                "of sync.model outside of no_sync(). Call sync.model itself and no other method of the module, and run "
                "one forward and one backward in turn."
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Check a step of any optimizer in this process.

        Raises:
            StepError: the optimizer steps within a backward that aggregates, or with gradients never aggregated.
        """
        owned = {p for group in optimizer.param_groups for p in group["params"] if p in self.names}
        if (self.running or self.backward_expected) and inside_backward() and owned:
            raise self.backward_error(
                f"{type(optimizer).__name__}.step() was called for {quoted(self.names[p] for p in owned)}, which moves "
                "them by gradients of this rank alone. Let it step after backward()"
            )
        if not self._accumulating:
            self.check_unaggregated(f"{type(optimizer).__name__}.step()", owned)

    def backward_aggregates(self, parameter: Tensor) -> bool:
        """Return whether the running backward, which accumulated into ``parameter``, aggregates; begin its step.

        Raises:
            StepError: another backward has not ended, or a static graph has changed.
        """
        if not (self.running or self.backward_expected):
            return False
        if not self.running:
            self.begin_backward()
        elif torch._C._current_graph_task_id() != self._graph_task_id:
            refuse_reentrant()
            raise self.unfinished_error()
        if self._static_params is not None and parameter not in self._static_params:
            raise self.graph_changed_error({parameter})
        return True

    def begin_backward(self) -> None:
        """Begin the step of a backward that aggregates, at its first gradient."""
        self.backward_expected = False
        self._graph_task_id = torch._C._current_graph_task_id()
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step within backward, and queue its end as an autograd callback."""
        raise NotImplementedError

    def begin_aggregation(self) -> None:
        """Start a step of the aggregator and record the parameters' version counters."""
        self.running = True
        try:
            self.aggregator.begin()
        except Unsupported:  # nothing has been sent: a backward outside of a CUDA graph may follow
            self.running = False
            raise
        self._versions = list(map(_version, self._version_checked))

    def check_unchanged(self) -> None:
        """Check that no parameter was modified in place within this backward.

        Raises:
            StepError: some were modified.
        """
        versions = list(map(_version, self._version_checked))
        if versions != self._versions:
            pairs = zip(self._version_checked, versions, self._versions, strict=True)
            changed = [self.names[p] for p, new, old in pairs if new != old]
            raise self.backward_error(
                f"{len(changed)} parameters were changed: {quoted(changed)}. An optimizer that steps within backward "
                "moves them by gradients of this rank alone; let it step after backward()"
            )

    def check_dropped(self, dropped: Sequence[Tensor]) -> None:
        """Check that no hook of the user removed a gradient. With ``find_unused_parameters`` it counts as unused.

        Args:
            dropped: parameters whose ``grad`` was None after their gradient had been accumulated.

        Raises:
            StepError: ``dropped`` is not empty.
        """
        if dropped and not self.find_unused:
            raise self.backward_error(
                f"hooks dropped the gradients of {quoted(self.names[p] for p in dropped)}. If an optimizer had used "
                "them, parameters moved by gradients of this rank alone: let it step after backward(). Else zero them "
                "in place"
            )

    def end_step(self) -> None:
        """End a step. If it succeeded, count it, and call ``on_first_step`` after the first one."""
        self.running = False
        if self.aggregator.scheduler.failure is None:
            self.steps += not self.aggregator.joined
            self.accumulated.clear()
            mark_aggregated(self.names.keys())
            if self.on_first_step is not None:
                self.on_first_step()
                self.on_first_step = None

    def check_static(self, arrived: Set[Tensor]) -> None:
        """Compare the parameters with a gradient in this backward with those of a static graph's first backward.

        Raises:
            StepError: they differ.
        """
        if self._static_params is None:
            self._static_params = arrived
        elif arrived != self._static_params:
            raise self.graph_changed_error(arrived ^ self._static_params)

    def graph_changed_error(self, parameters: Set[Tensor]) -> StepError:
        """Return the error for a static graph that has changed for ``parameters``."""
        names = [name for p, name in self.names.items() if p in parameters]
        return self.backward_error(f"the graph has changed for {quoted(names)}. Leave out static_graph=True")

    def incomplete_error(self, arrived: Set[Tensor]) -> StepError:
        """Return the error for a backward that produced gradients only for ``arrived``."""
        missing = [name for p, name in self.names.items() if p not in arrived]
        if self.find_unused:
            return self.backward_error(
                f"{len(missing)} parameters got no gradient: {quoted(missing)}. The loss depends on some of them, and "
                "find_unused_parameters=True is for the others. Call backward() without inputs="
            )
        return self.backward_error(
            f"{len(missing)} parameters got no gradient: {quoted(missing)}. Where a step may leave parameters out, "
            "give find_unused_parameters=True. Freeze what is never trained by requires_grad_(False) before the "
            "synchronizer is constructed"
        )

    def backward_error(self, what: str) -> StepError:
        """Fail the scheduler, so that no step follows, and return the error for a backward that cannot aggregate."""
        error = StepError(f"{self._where}: in this backward {what}. Construct the synchronizer anew.")
        self.aggregator.abandon(error)
        return error

    def unfinished_error(self) -> StepError:
        """Return the error for a forward or backward that begins before another one has ended."""
        return StepError(
            f"{self._where}: a forward or a backward began before the end of another. Either an "
            "exception left that one when some gradients had been sent, and other ranks wait for the rest: end the "
            "job. Or a Function calls backward() within its own, whose gradients are not complete by then."
        )

    @contextmanager
    def join(self) -> Iterator[None]:
        """Run a block with unequal numbers of steps per rank; after it, shadow the ranks that still have data."""
        yield
        self.aggregator.catch_up()
        self.aggregator.joined = True
        while self._exchange_forward_flags():
            self.await_buffers(self.send_buffers())
            self.begin_aggregation()
            self.shadow()
            self.aggregator.catch_up()
        self.buffer_root = 0

    def shadow(self) -> None:
        """Take part in a step of other ranks with the weight ``aggregator.joined_weight`` and zeros as gradients."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the hooks."""
        raise NotImplementedError
