"""What every source of gradients does: tell an aggregator when a step begins, what arrives, and when it ends."""

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

from hvdbridge.errors import StepError
from hvdbridge.execution.flow import Submission
from hvdbridge.policies.dense import bucket_mb
from hvdbridge.policy.base import BYTEWISE_MB, CODED_MB, Policy
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.autograd import inside_backward, refuse_compiled_autograd, refuse_reentrant
from hvdbridge.reduction.parameters import ParameterWatch, listed
from hvdbridge.reduction.replicate import broadcast_tensors


@dataclass(frozen=True)
class Options:
    """What a source is told, besides model and optimizers; see ``GradientSynchronizer``.

    Attributes:
        said: the user said how large buckets are.
        whole: the policy waits for the last gradient anyway, so all of one type and device are one bucket, which need
            not be joined.
        ignored: names of parameters and buffers that are left alone.
        wrapper: the user's module is trained through this one (``hb.DistributedDataParallel``).
    """

    bucket_mb: float
    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False
    said: bool = False
    whole: bool = False
    ignored: tuple[str, ...] = field(default=(), repr=False)  # ranks may differ in what they leave alone
    wrapper: Any = field(default=None, repr=False)

    @property
    def bucket_bytes(self) -> float:
        return math.inf if self.whole else self.bucket_mb * 2**20


SIZES = "bucket_cap_mb_list" in signature(torch.nn.parallel.DistributedDataParallel).parameters
"""Whether DDP can have a small first bucket before others of a size that is not its default: since torch 2.13, but not
with a static graph (which has several in its first step then, and says that each is the first and none the last)."""


def usual_bucket_mb(
    policy: Policy, nodes: Iterable[int], blocks_host: bool = True, static_graph: bool = False
) -> float:
    """The size of a bucket in MiB where nobody says one: the policy's (:func:`~hvdbridge.policies.dense.bucket_mb`),
    but among several nodes at most :data:`CODED_MB`, or :data:`BYTEWISE_MB`
    where it is :attr:`bytewise <hvdbridge.Policy.bytewise>`, if that costs no small first bucket.

    While a bucket of DDP's size is filled, a network of 1 Gbit/s has long sent the first one, and waits. For the plain
    mean that was 4 % of a step, and 5 MiB in place of 10 are 1 to 7 % with such codes (others gain nothing or lose as
    much by it; within a machine ``ef(int8)`` lost 3 to 5 %). It follows from what all ranks know alike, and is the same
    on all backends.

    Args:
        nodes: that of each rank (any numbers, equal within a node); empty: not known.
        blocks_host: not NCCL (:class:`.Capabilities`), which wants few large operations.

    >>> from hvdbridge.policies import from_spec
    >>> specs = ("mean", "topk", "ef(int8)")
    >>> [usual_bucket_mb(from_spec(spec), nodes) for spec in specs for nodes in ((0, 0), (0, 1))]
    [25.0, 10.0, 10.0, 10.0, 10.0, 5.0]
    >>> specs = ("bf16", "bf16(topk)", "hierarchical(fp8)", "local_sgd(inner=int8)", "mean:exact=true", "fp16(median)")
    >>> [from_spec(spec).bytewise for spec in specs]
    [True, False, True, False, True, True]
    """
    several = any(one != other for one, other in pairwise(nodes))
    if not several or not blocks_host or not SIZES or static_graph:
        return bucket_mb(policy)
    return min(bucket_mb(policy), BYTEWISE_MB if policy.bytewise else CODED_MB)


LARGE = 1 << 20
"""Bytes of a parameter, on average, from which on views of buckets cost more on a CPU than they save."""


def views_pay(params: Iterable[Tensor]) -> bool:
    """Whether ``p.grad`` should be a view of a bucket: always on CUDA, on a CPU where parameters are small.

    A view lets the gradient that backward made be freed at once. C libraries give large memory back to the system then,
    which hands it out again page by page: with BERT-base on two cores that cost 8 to 50 % of a step, and copies 3 %.
    """
    sizes = [p.numel() * p.element_size() for p in params if p.device.type == "cpu"]
    return sum(sizes) <= LARGE * len(sizes)


_version: Callable[[Any], int] = attrgetter("_version")
_sources: WeakSet[Source] = WeakSet()


def closure_of(args: Any, kwargs: Any) -> Any:
    """The closure that ``optimizer.step`` was called with, by the arguments of a step hook; None: there is none."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch calls this before each step of each optimizer. A step with a closure makes its gradients later."""
    for source in [each for each in _sources if each.touched or each.running or each.expected]:
        if closure_of(args, kwargs) is None:
            source.before_step(optimizer)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_any_step)


def aggregated(parameters: Set[Tensor]) -> None:
    """The gradients of ``parameters`` have been aggregated: no open source warns of them."""
    for source in _sources:
        if source.touched:
            source.touched = [p for p in source.touched if p not in parameters]


def front_end(name: str) -> Callable[..., Source]:
    """The class of a front end, by the name that a backend declares; imports what it needs."""
    module, _, attribute = FRONT_ENDS[name].partition(":")
    made: Callable[..., Source] = getattr(import_module(f"hvdbridge.reduction.{module}"), attribute)
    return made


FRONT_ENDS = {"ddp": "ddp:DdpSource", "hooks": "hooks:HookSource", "horovod": "horovod_optimizer:HorovodSource"}
"""By what a backend declares, see :class:`hvdbridge.backends.registry.Backend`."""


class Source:
    """Base of the sources.

    Args:
        model: the user's module.
        optimizers: the user's.
        params: what is aggregated, by name.

    Attributes:
        model, optimizers: as the backend's own users know them.
        synchronizing: False within ``no_sync()``: gradients accumulate locally.
        expected: the next backward that makes a gradient of a parameter aggregates.
        running: a synchronizing backward has begun and not ended.
        touched: parameters whose local gradient changed since the last aggregation.
        steps: synchronizing backwards of this rank that ended.
        root: the rank whose buffers all get: 0, but within ``join()`` the last one that has data.
        names: of the parameters.
        parameters: tells when the model has others.
        started: called when the first step is through.
    """

    started: Callable[[], None] | None = None

    def __init__(
        self, model: Module, optimizers: list[Optimizer], params: Mapping[str, Parameter], aggregator: Aggregator,
        options: Options,
    ) -> None:  # fmt: skip
        self.model: Any = model
        self.optimizers, self.aggregator = optimizers, aggregator
        self.names: dict[Tensor, str] = {p: name for name, p in params.items()}
        self.parameters = ParameterWatch(model, params, options.ignored)
        # Forwards change the others in place, and may be recomputed within backward
        renormalized = {
            module.weight for module in model.modules()
            if isinstance(module, Embedding | EmbeddingBag) and module.max_norm is not None
        }  # fmt: skip
        self._steady = [p for p in self.names if p not in renormalized]
        self._versions: list[int] = []  # of the parameters, when a backward begins
        self._local = False  # the last forward was one within no_sync()
        self.find_unused = options.find_unused_parameters and not options.static_graph
        self.static_graph = options.static_graph
        self._static: Set[Tensor] | None = None  # the parameters that got gradients in the first step
        self.synchronizing = True
        self.expected = self.running = False
        self._backward = -1
        self.root = 0
        # The modules whose buffers are sent: they may be given new ones
        self._buffers = dict(model.named_modules()) if options.broadcast_buffers else {}
        self._ignored = {tuple(name.rpartition(".")[::2]) for name in options.ignored}  # modules' names, and buffers'
        self.touched: list[Tensor] = []
        self.steps = 0
        _sources.add(self)
        _watch_optimizers()

    def send_buffers(self) -> Submission[None] | None:
        """Begin to copy rank :attr:`root`'s buffers to all; None where there are none.

        All ranks have rank 0's buffers after each step. They are sent as the last of a step, so one rank may evaluate
        alone: the next forward sends nothing. As in DDP a second forward before the backward does, where the first may
        have changed them. Called before ``aggregator.end()``, which may start flows that outlive the step: these need
        not be waited for.
        """
        found = {
            id(buffer): buffer
            for prefix, module in self._buffers.items()
            for name, buffer in module._buffers.items()
            if buffer is not None and (prefix, name) not in self._ignored
        }
        if not found:
            return None
        flow = broadcast_tensors(found.values(), self.root)
        return self.aggregator.scheduler.submit(Submission(flow, self.aggregator.communicator))

    def await_buffers(self, pending: Submission[None] | None) -> None:
        """Wait for what :meth:`send_buffers` has begun."""
        if pending is not None:
            pending.wait()
            self.aggregator.scheduler.order()  # the next forward reads them

    def stop(self) -> None:
        """Ignore optimizers' steps and backwards from now on."""
        self.expected = False
        self.parameters.close()
        _sources.discard(self)

    @property
    def _where(self) -> str:
        return f"rank {self.aggregator.communicator.rank}"

    def before_forward(self) -> None:
        """Called by a wrapper before each forward of its module, which has no hook of ours."""

    def after_forward(self, output: Any) -> None:
        """Called by a wrapper after each forward, with what it returns."""

    def outputs(self, output: Any) -> list[Tensor]:
        """The tensors in what a forward returned: from them ``find_unused_parameters`` looks back through the graph.

        Raises:
            StepError: there are none.
        """
        found: list[Tensor] = list(_find_tensors(output))
        if not found:
            raise StepError(
                f"{self._where}: find_unused_parameters=True looks for tensors in what the forward returns, and there "
                f"are none in {type(output).__name__}. Return them in a tuple, list, dict or dataclass."
            )
        return found

    def open_forward(self, aggregates: bool) -> None:
        """Called before each forward; ``aggregates``: its backward does.

        Raises:
            StepError: see :meth:`check_forward`; or one rank makes this forward alone.
        """
        if not torch.is_grad_enabled():
            return
        self.check_forward(aggregates)
        # Where another forward came before it, and no backward, the first one may have changed buffers
        again = self.expected and any(module._buffers for module in self._buffers.values()) and not inside_backward()
        if aggregates and (self.aggregator.joining or again):
            # A rank that makes this forward alone waits here for the others, and takes no bucket for buffers
            self._announce()
            self.await_buffers(self.send_buffers())

    def _announce(self) -> bool:
        """Tell that a forward begins, or that this rank has no more data; False when none has. Called by every rank
        alike. Within ``join()`` buffers are from the last rank that still has data, as in DDP."""
        flags = self.aggregator.in_forward(not self.aggregator.joined)
        active = [rank for rank, flag in enumerate(flags) if flag]
        if active and self.aggregator.joining:
            self.root = active[-1]
        return bool(active)

    def check_forward(self, synchronizing: bool) -> None:
        """Called before each forward that records gradients.

        Raises:
            StepError: the backward before did not end, the model has other parameters, or the first step of a static
                graph would not aggregate.
            BaseException: what has ended an earlier step.
        """
        if synchronizing:
            self.aggregator.scheduler.check_failure()
        if self.running and not inside_backward():
            raise self.left_open()
        refuse_compiled_autograd()
        if synchronizing:
            self.parameters.check(f"{self._where}: forward")
        elif self.static_graph and self.steps == 0:
            raise StepError(
                f"{self._where}: with static_graph=True the first backward of all must aggregate. Make one step "
                "without no_sync(), or leave out static_graph=True."
            )
        self._local = not synchronizing

    def check_strays(self, when: str, held: set[Tensor] | None = None) -> None:
        """
        Raises:
            StepError: parameters (``held``; None: all) have gradients that were never aggregated.
        """
        touched = set(self.touched) if held is None else held.intersection(self.touched)
        lost = [p for p in self.names if p in touched and p.grad is not None and p.grad.any()]
        if lost:
            raise StepError(
                f"{self._where}: {when} with gradients of {len(lost)} parameters that were never aggregated: "
                f"{listed(self.names[p] for p in lost)}. A backward aggregates if it is the first one after a forward "
                "of sync.model outside of no_sync(). Call sync.model itself and no other method of the module, and run "
                "one forward and one backward in turn."
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before each step of any optimizer in this process.

        Raises:
            StepError: the optimizer steps within a backward that aggregates, or with gradients that nobody aggregated.
        """
        held = {p for group in optimizer.param_groups for p in group["params"] if p in self.names}
        if (self.running or self.expected) and inside_backward() and held:
            raise self.refused(
                f"{type(optimizer).__name__}.step() was called for {listed(self.names[p] for p in held)}, which moves "
                "them by gradients of this rank alone. Let it step after backward()"
            )
        if not self._local:
            self.check_strays(f"{type(optimizer).__name__}.step()", held)

    def takes(self, parameter: Tensor) -> bool:
        """Called by a hook: a gradient of ``parameter`` is there. Whether this backward aggregates.

        Raises:
            StepError: another backward has not ended, or the graph is not static.
        """
        if not (self.running or self.expected):
            return False
        if not self.running:
            self.open_backward()
        elif torch._C._current_graph_task_id() != self._backward:
            refuse_reentrant()
            raise self.left_open()
        if self._static is not None and parameter not in self._static:
            raise self.changed({parameter})
        return True

    def open_backward(self) -> None:
        """The first gradient of a synchronizing backward is there."""
        self.expected = False
        self._backward = torch._C._current_graph_task_id()
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step within backward, and queue its end."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start a step of the aggregator."""
        self.running = True
        self.aggregator.begin()
        self._versions = list(map(_version, self._steady))

    def check_unchanged(self) -> None:
        """
        Raises:
            StepError: parameters were changed within this backward.
        """
        now = list(map(_version, self._steady))
        if now != self._versions:
            pairs = zip(self._steady, now, self._versions, strict=True)
            changed = [self.names[p] for p, one, other in pairs if one != other]
            raise self.refused(
                f"{len(changed)} parameters were changed: {listed(changed)}. An optimizer that steps within backward "
                "moves them by gradients of this rank alone; let it step after backward()"
            )

    def check_kept(self, dropped: Sequence[Tensor]) -> None:
        """
        Args:
            dropped: the parameters whose gradients hooks of the user dropped within this backward.

        Raises:
            StepError: there are some; not with ``find_unused_parameters``, where that is as if this rank had not used
                them.
        """
        if dropped and not self.find_unused:
            raise self.refused(
                f"hooks dropped the gradients of {listed(self.names[p] for p in dropped)}. If an optimizer had used "
                "them, parameters moved by gradients of this rank alone: let it step after backward(). Else zero them "
                "in place"
            )

    def finished(self) -> None:
        """The step is over, or failed."""
        self.running = False
        if self.aggregator.scheduler.failure is None:
            self.steps += not self.aggregator.joined
            self.touched.clear()
            aggregated(self.names.keys())
            if self.started is not None:
                self.started()
                self.started = None

    def check_static(self, arrived: Set[Tensor]) -> None:
        """The parameters that got gradients in a backward of a static graph.

        Raises:
            StepError: they are not those of the first one.
        """
        if self._static is None:
            self._static = arrived
        elif arrived != self._static:
            raise self.changed(arrived ^ self._static)

    def changed(self, parameters: Set[Tensor]) -> StepError:
        """The error of a graph that is not static, by the parameters that show it."""
        names = [name for p, name in self.names.items() if p in parameters]
        return self.refused(f"the graph has changed for {listed(names)}. Leave out static_graph=True")

    def incomplete(self, arrived: Set[Tensor]) -> StepError:
        """The error of a backward that made gradients for these parameters alone."""
        missing = [name for p, name in self.names.items() if p not in arrived]
        if self.find_unused:
            return self.refused(
                f"{len(missing)} parameters got no gradient: {listed(missing)}. The loss depends on some of them, and "
                "find_unused_parameters=True is for the others. Call backward() without inputs="
            )
        return self.refused(
            f"{len(missing)} parameters got no gradient: {listed(missing)}. Where a step may leave parameters out, "
            "give find_unused_parameters=True. Freeze what is never trained by requires_grad_(False) before the "
            "synchronizer is constructed"
        )

    def refused(self, what: str) -> StepError:
        """The error of a backward that cannot be aggregated. It poisons the scheduler: no step follows."""
        error = StepError(f"{self._where}: in this backward {what}. Construct the synchronizer anew.")
        self.aggregator.abandon(error)
        return error

    def left_open(self) -> StepError:
        """The error of what follows a backward that was left in the middle."""
        return StepError(
            f"{self._where}: a forward or a backward began before the end of another. Either an "
            "exception left that one when some gradients had been sent, and other ranks wait for the rest: end the "
            "job. Or a Function calls backward() within its own, whose gradients are not complete by then."
        )

    @contextmanager
    def join(self) -> Iterator[None]:
        """A block that ranks leave after unequal numbers of steps; its end shadows the others."""
        yield
        self.aggregator.catch_up()
        self.aggregator.joined = True
        while self._announce():
            self.await_buffers(self.send_buffers())
            self.begin()
            self.shadow()
            self.aggregator.catch_up()
        self.root = 0

    def shadow(self) -> None:
        """Take part in a step that has begun, with weight 0: it does not matter what the buckets hold."""
        raise NotImplementedError

    def remove(self) -> None:
        """Take the hooks off."""
        raise NotImplementedError
