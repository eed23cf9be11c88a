"""Horovod's ``DistributedOptimizer``, over any backend.

Rules:

1. The result is a subclass of the user's optimizer class, made on the spot, around the same parameter groups:
   ``isinstance`` and schedulers see what they know.
2. Gradients travel while backward runs, in flat buckets and in the scheduler's order; names are compared once, when the
   channel is opened, and not negotiated again. The first step's are handed in by the thread that opens the channel:
   which of several optimizers' steps comes first may differ between ranks then, too.
3. A step ends in ``synchronize()`` (or ``step()``, which calls it), and nothing waits for other ranks before: until
   then backward may be called several times, each for other parameters, and other optimizers and operations may come
   between, in another order on each rank. Each optimizer has a channel and a thread of its own.
4. The bits are Horovod's: what is sent is the compressed gradient, the sum is scaled after it was formed. So are the
   tensors: results are copied into the gradients that backward made, which scripts hold over ``zero_grad()``.
5. Construction sends nothing, so ranks that join later (:mod:`.elastic`) need not repeat it; after ``hvd.shutdown()``
   and ``hvd.init()`` the next step opens a channel anew. Its name is made of the parameters', as Horovod's operations
   are called after them: optimizers match by it, whichever steps first.
6. Parameters that are unfrozen or added later are reduced by themselves in the first step that finds them: which of a
   step's gradients have arrived differs between ranks, so the channel is the old one's to its end. The next step opens
   another, of all.
7. A rank that joined takes part in steps with zeros: :mod:`.joining`.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hvdbridge.errors import CollectiveTimeout, RankFailed
from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Aggregated, Exchange, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket, refuse_complex
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.reduction.aggregator import Aggregator, Deliver
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.reduction.reducer import BucketEntry, FlatBucket, Reducer, make_buckets
from hvdbridge.reduction.source import Options, usual_bucket_mb
from hvdbridge.torch import asynchronous, basics, joining
from hvdbridge.torch.basics import Adasum, Average, Max, Min, Product, Sum
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.exceptions import DifferentParameters, internal_error
from hvdbridge.torch.operations import Channel, Operations
from hvdbridge.torch.process_sets import ProcessSet, global_process_set
from hvdbridge.torch.timeline import Timeline
from hvdbridge.torch.util import split_list
from hvdbridge.training import runtime

OPS = ((Average, "sum"), (Sum, "sum"), (Min, "min"), (Max, "max"), (Product, "product"))
"""Horovod's reductions and ours."""

TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before step() or synchronize(). "
    "Pass a larger backward_passes_per_step to accumulate them."
)
TOO_EARLY = (
    "optimizer.zero_grad() between loss.backward() and optimizer.step() or optimizer.synchronize(): gradients are on "
    "their way to other ranks. Call it after one of these, or before loss.backward()."
)
TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): write "
    "'with optimizer.skip_synchronize(): optimizer.step()', which says that gradients are complete."
)
"""Begins as Horovod's warning, by which scripts filter it."""
ONE_WAY = "policy= stands in the place of op, compression and gradient_predivide_factor: give one"

REPLACED = (
    "another DistributedOptimizer over some of this one's parameters was made after it, and reduces them in its place. "
    "Use that, or give each optimizer parameters of its own."
)

_reducing: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter and process set, the optimizer whose hook it has."""


@dataclass(frozen=True, repr=False)
class Reduction(Policy):
    """What Horovod does to a gradient: compress, scale, reduce, scale, decompress.

    ``Average`` divides after the sum. A compressor that works element by element is given the whole bucket, any other
    class or object with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)`` each gradient by
    itself.
    """

    op: Any = Average
    compression: Any = Compression.none
    predivide: float = 1.0

    def __post_init__(self) -> None:
        """Its options are objects of Horovod's API: :func:`DistributedOptimizer` checks them."""

    def __repr__(self) -> str:
        """By this ranks compare: without the addresses of objects."""
        compression = getattr(self.compression, "__qualname__", type(self.compression).__qualname__)
        return f"Reduction(op={self.op}, compression={compression}, predivide={self.predivide})"

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if self.compression in (Compression.none, Compression.fp16, Compression.bf16):
            return Aggregated((yield from self._reduce(bucket.buffer, bucket.size)))
        parts = []
        for gradient in bucket.grads.values():
            parts.append((yield from self._reduce(gradient, bucket.size)).reshape(-1))
        return Aggregated(torch.cat(parts))

    def _reduce(self, tensor: Tensor, size: int) -> Exchange:
        sent, context = self.compression.compress(tensor)
        if self.predivide != 1.0:
            sent = sent * (1.0 / self.predivide)
        total = yield AllReduce(sent, next(name for op, name in OPS if op == self.op))
        factor = self.predivide / size if self.op == Average else 1.0
        if factor != 1.0:
            total = total.mul_(factor)
        return self.compression.decompress(total, context)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Settings:
    """What ranks must agree on, besides the parameters."""

    policy: Policy
    groups: int | Sequence[Sequence[Tensor]] | None
    sparse_as_dense: bool

    def lines(self) -> list[str]:
        grouped = self.groups if isinstance(self.groups, int) or self.groups is None else list(map(len, self.groups))
        return [f"policy {label(self.policy)}", f"groups {grouped}", f"sparse_as_dense {self.sparse_as_dense}"]


class Opening:
    """A channel for one optimizer, and a reducer on it, that is being opened; the constructor does not wait.

    Attributes:
        arrived: the parameters whose gradients are there: they are handed in at once.
        key: process set and name of the channel, the same on all ranks.
        bucket_mb: the size of a bucket in MiB.
    """

    def __init__(
        self, params: Mapping[str, Parameter], arrived: Iterable[Tensor], settings: Settings, process_set: ProcessSet,
        name: str, number: int,
    ) -> None:  # fmt: skip
        self.params = params
        self.arrived = list(arrived)
        self.settings = settings
        self.operations = basics._current()
        self._reducer: OptimizerReducer | None = None
        self._error: Exception | None = None
        first = next(iter(params.values()))
        self._ready = torch.cuda.current_stream(first.device).record_event() if first.is_cuda else None
        title = f"DistributedOptimizer {number} (first parameter {next(iter(params))!r})"
        self.key = asynchronous._number(process_set), f"channel.{name}"
        self.bucket_mb = bucket_mb(self.operations, settings.policy, self.operations.members(self.key[0]))
        self._pending = self.operations.open(name, self.key[0], title, self._offer(), self._opened)

    def _offer(self) -> tuple[dict[str, str], dict[str, int], list[str]]:
        """What ranks compare; and the number of sparse dimensions of what is sparse on this one."""
        mine = {name: f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}" for name, p in self.params.items()}
        sparse = {}
        for name, p in self.params.items():
            if p.grad is not None and p.grad.is_sparse and not self.settings.sparse_as_dense:
                sparse[name] = p.grad.sparse_dim()
        return mine, sparse, [*self.settings.lines(), f"buckets of {self.bucket_mb:g} MB"]

    @property
    def stale(self) -> bool:
        """Of a session that is over, or failed."""
        return basics._operations is not self.operations or bool(self._pending.error)

    def _opened(self, channel: Channel) -> None:
        """On the thread of operations, which must go on: what goes wrong here is told to who waits."""
        try:
            difference = differences(channel.offers)
            if difference:
                channel.close()
                raise internal_error(difference, DifferentParameters)
            if self._ready is not None:
                torch.cuda.current_stream().wait_event(self._ready)
            self._reducer = OptimizerReducer(self, channel)
            for parameter in self.arrived:
                self._reducer.gradient_of(parameter)
        except Exception as error:
            self._error = error

    def wait(self) -> OptimizerReducer:
        """What was opened.

        Raises:
            DifferentParameters: ranks have other parameters, or other options.
            HorovodInternalError: a rank is gone, or never opens it.
        """
        self.operations.wait(self._pending)
        if self._error is not None:
            raise self._error
        assert self._reducer is not None, "it is open"
        return self._reducer


def bucket_mb(operations: Operations, policy: Policy, ranks: Iterable[int]) -> float:
    """``HOROVOD_FUSION_THRESHOLD`` in MiB, or the session's size, or what is usual among these ranks."""
    given = operations.settings.bucket_bytes
    if given is not None:
        return given / 2**20
    world = operations.session.communicator
    nodes = [world.nodes[rank] for rank in ranks] if world.nodes else ()
    usual = usual_bucket_mb(policy, nodes, world.capabilities.blocks_host)
    return operations.session.config.fixed_bucket_mb(usual, "hvdbridge.torch.DistributedOptimizer")


def differences(offers: Sequence[tuple[dict[str, str], dict[str, int], list[str]]]) -> str:
    """What a rank has that rank 0 has not; empty if there is nothing."""
    first, _, lines = offers[0]
    for rank, (theirs, _, their_lines) in enumerate(offers):
        where = f"DistributedOptimizer: rank {rank} differs from rank 0 (numbers in the process set)"
        if theirs != first:
            names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
            shown = "; ".join(f"{n!r} is {theirs.get(n, 'missing')}, not {first.get(n, 'there')}" for n in names[:8])
            return f"{where} in {len(names)} parameters: {shown}. Give all ranks the same model."
        if their_lines != lines:
            return f"{where}: it has {their_lines}, rank 0 {lines}"
    return ""


class OptimizerReducer(Reducer):
    """Carries one optimizer's gradients through a policy, among the ranks of a process set, for one session.

    Attributes:
        sparse: the number of sparse dimensions of gradients that are; these travel as raw operations.
        begun: how many steps have begun.
    """

    def __init__(self, opening: Opening, channel: Channel) -> None:
        settings, params = opening.settings, opening.params
        self.operations: Operations = opening.operations
        self.key = opening.key
        self.names = list(channel.offers[0][0])  # in rank 0's order
        self.sparse = {name: dims for _, found, _ in channel.offers for name, dims in found.items()}  # on any rank
        self.params = {name: params[name] for name in self.names}
        self.dense = {name: p for name, p in self.params.items() if name not in self.sparse}
        channels = channel.communicator, channel.control
        device = next(iter(params.values())).device
        self._context = ReductionContext(self.operations.session, channels, device, channel.check)
        self.scheduler = self._context.scheduler
        self.operations.on_failure.append(self.scheduler.fail)
        aggregator = Aggregator(settings.policy, self.dense, *channels, self.scheduler, weighted=False)
        options = Options(opening.bucket_mb, whole=settings.policy.scope == "step")
        super().__init__(self._cut(settings, options), aggregator)
        self.begun = 0
        self._follows = False  # the step that runs is one of other ranks
        self._densified: list[Parameter] = []  # whose sparse gradient became dense for this step
        self._since: dict[str, float] = {}  # for the timeline: when a gradient arrived

    def _cut(self, settings: Settings, options: Options) -> list[FlatBucket]:
        """Buckets of the usual size, or one (per type and device) for each group that the user made."""
        if settings.groups is None or settings.groups == 0:
            return make_buckets(self.dense, options)
        names: dict[Tensor, str] = {p: name for name, p in self.dense.items()}
        if isinstance(settings.groups, int):
            parts = split_list(list(self.dense), settings.groups)
        else:
            parts = [[names[p] for p in group if p in names] for group in settings.groups]
            grouped = {name for part in parts for name in part}
            parts += [[name] for name in self.dense if name not in grouped]
        whole = replace(options, whole=True)
        found = []
        for part in reversed([part for part in parts if part]):
            found += make_buckets({name: self.dense[name] for name in part}, whole)
        return found

    @property
    def usable(self) -> bool:
        """Its session is open, and nothing has failed."""
        operations = self.operations
        return operations is basics._operations and not operations.failure and self.scheduler.failure is None

    def gradient_of(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is there. Called once per step for each."""
        entry = self.entries.get(parameter)
        if entry is None:
            return  # sparse
        if not self.running:
            self.begin()
        if self.operations.timeline is not None:
            self._since[entry.name] = time.monotonic()
        self.arrive(entry)

    def hand_in(self) -> None:
        """Submit what is missing as what it holds, or zeros."""
        if not self.running:
            self.begin()
        self.submit_rest()

    def finish(self) -> None:
        """Submit what is missing; wait; write the results into ``p.grad``, unless the step is one of other ranks."""
        try:
            self.hand_in()
            self.aggregator.end()
            if not self._follows:
                self.write_back()
        finally:
            self.reset()

    def follow(self, step: int) -> None:
        """Take part with zeros in the steps up to number ``step``; does not wait for the last."""
        while self.begun < step:
            if self.running:  # others are beyond it, so it is complete, or will be
                self.finish()
            self.begin()
            self._follows = True
            for bucket in self.buckets:
                self.submit([None] * len(bucket.entries))

    def end_following(self) -> None:
        """Wait for what :meth:`follow` began."""
        if self._follows:
            self.finish()

    def combine(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``values`` by name through the policy: one step without gradients. Views that live until the next."""
        self.begin()
        try:
            for bucket in self.buckets:
                self.submit([values[entry.name] for entry in bucket.entries])
            self.aggregator.end()
            for bucket in self.buckets:
                bucket.take_update()
            return {entry.name: entry.view for entry in self.entries.values()}
        finally:
            self.reset()

    def begin(self) -> None:
        self.begun += 1
        self.operations.begins(*self.key, self.begun)
        super().begin()

    def submit(self, values: Sequence[Tensor | None] | None = None) -> None:
        super().submit(values)
        if not self.incomplete:
            self.scheduler.flush()  # nobody may wait for it for long; other ranks need all rounds of all flows

    def gradient(self, entry: BucketEntry) -> Tensor | None:
        parameter = entry.parameter
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
            self._densified.append(parameter)
        return parameter.grad

    def delivery(self, bucket: FlatBucket) -> Deliver:
        timeline = self.operations.timeline
        return bucket.deliver if timeline is None else partial(self._trace, timeline, bucket, time.monotonic())

    def _trace(self, timeline: Timeline, bucket: FlatBucket, handed_in: float, update: Tensor | None) -> None:
        """A bucket is through: rows of the timeline, called as Horovod calls them."""
        bucket.deliver(update)
        for entry in bucket.entries if update is not None else ():
            name = f"allreduce.{entry.name}"
            timeline.queued(name, self._since.get(entry.name, handed_in), handed_in)
            timeline.executed(name, "allreduce", handed_in, {"fused": len(bucket.entries)})

    def reset(self) -> None:
        super().reset()
        self._follows = False
        self._since.clear()
        for parameter in self._densified:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse()  # in all dimensions, as Horovod's
        self._densified.clear()

    def close(self) -> None:
        """Free the channel; harmless when repeated."""
        if not self._context.closed:
            self.operations.on_failure.remove(self.scheduler.fail)
        self._context.close()


class _Distributed(Optimizer):
    """What both kinds have in common; stands before the user's class in the order of resolution."""

    op: Any
    compression: Any
    process_set: ProcessSet
    backward_passes_per_step: int

    _parameter_names: dict[Tensor, str]
    """As Horovod's, which scripts read."""

    def _setup(self, names: dict[Tensor, str], settings: Settings) -> None:
        self._parameter_names = names
        self._settings = settings
        self._opening: Opening | None = None
        self._reducer: OptimizerReducer | None = None
        self._outgrown = False  # it lacks parameters: the next step opens another
        self._sparse: dict[str, Any] = {}  # handles of what was sent in this step
        self._named: tuple[Operations, int, str] | None = None
        self._delay: dict[Parameter, int] = {}
        self._arrived: set[Tensor] = set()  # a gradient came since the last synchronize()
        self._handed: set[Tensor] = set()  # ... for the last time of this step
        self._synchronized = False  # p.grad holds what synchronize() promises
        self._should_synchronize = True
        self._handles: list[Any] = []
        self._replaced = False
        self._hook()
        self._follower = Follower(self)
        joining.add(self._follower)

    @property
    def _active(self) -> bool:
        """Whether there is anybody to reduce with; alone, only a policy of the user's own has something to do."""
        alone = basics.size() == 1 and isinstance(self._settings.policy, Reduction)
        return not alone and bool(self.process_set.included())

    def _hook(self) -> list[Parameter]:
        """Hook parameters that require gradients and did not before; returns them."""
        found: list[Parameter] = []
        if self._replaced:
            return found
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and p not in self._delay:
                    self._parameter_names.setdefault(p, f"allreduce.noname.{i}.{j}")
                    self._delay[p] = self.backward_passes_per_step
                    self._take(p)
                    found.append(p)
        return found

    def _take(self, p: Tensor) -> None:
        """The optimizer that reduces ``p`` among the same ranks gives way, with all it has: two would reduce it twice.
        It does on all ranks at once, whatever each of them still holds. The last one lives as long as a parameter."""
        by_set = _reducing.setdefault(p, {})
        earlier = by_set[self.process_set]() if self.process_set in by_set else None
        if earlier is not None:
            earlier._give_way()
        by_set[self.process_set] = weakref.ref(self)
        self._handles.append(p.register_post_accumulate_grad_hook(self._gradient))

    def _give_way(self) -> None:
        self._replaced = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _check_place(self) -> None:
        if self._replaced:
            raise RuntimeError(REPLACED)

    def _gradient(self, p: Any) -> None:
        """Called by autograd when the gradient of ``p`` was accumulated."""
        if not self._active:
            return
        if self._delay[p] <= 0:
            raise AssertionError(f"{TOO_OFTEN} (parameter {self._parameter_names[p]!r})")
        if p.grad is not None and p.grad.requires_grad:
            name = self._parameter_names[p]
            raise AssertionError(f"backward(create_graph=True): the gradient of {name!r} cannot be reduced")
        self._delay[p] -= 1
        self._arrived.add(p)
        self._synchronized = False
        if self._delay[p] == 0:
            self._handed.add(p)
            self._complete(p)

    def _complete(self, p: Tensor) -> None:
        """The last gradient of this step for ``p``."""

    def _ready(self) -> OptimizerReducer | None:
        """The reducer, if it is of the open session, for this step and whatever parameters came since."""
        reducer = self._reducer
        fits = reducer is not None and reducer.operations is basics._operations and not self._outgrown
        return reducer if fits else None

    def _begin_opening(self, arrived: Iterable[Tensor]) -> Opening:
        """Ask for a channel, if that has not happened."""
        if self._opening is None or self._opening.stale:
            params = {self._parameter_names[p]: p for p in self._delay}
            _, number, name = self._name()
            self._opening = Opening(params, arrived, self._settings, self.process_set, name, number)
        return self._opening

    def _open(self, arrived: Iterable[Tensor] = ()) -> OptimizerReducer:
        """A reducer of the parameters that are followed now, with what ``arrived`` handed in; collective."""
        try:
            reducer = self._begin_opening(arrived).wait()
        finally:
            self._opening = None
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._outgrown = reducer, False
        return reducer

    def _name(self) -> tuple[Operations, int, str]:
        """Of the channel: made of a parameter's name that does not depend on their order, and a number where several
        optimizers share it. The other number tells this process's optimizers apart, in messages."""
        operations = basics._current()
        if (named := self._named_now()) is None:
            place, same = self._next_place(operations)
            operations.optimizers[place] = same
            self._named = named = operations, sum(operations.optimizers.values()), f"{place[1]}.{same}"
        return named

    def _named_now(self) -> tuple[Operations, int, str] | None:
        """What it is called, if it has a name in this session."""
        return self._named if self._named is not None and self._named[0] is basics._current() else None

    def _next_place(self, operations: Operations) -> tuple[tuple[int, str], int]:
        place = (asynchronous._number(self.process_set), min(self._parameter_names.values(), default=""))
        return place, operations.optimizers.get(place, 0) + 1

    def _only_was(self) -> bool:
        """Replaced, and without a channel in this session: nobody will ever use it."""
        return self._replaced and self._named_now() is None

    def _expected_name(self) -> str:
        """Of the channel, the one it has or would have if it were opened now: to look takes no number, since not all
        ranks look."""
        if (named := self._named_now()) is not None:
            return named[2]
        (_, first), same = self._next_place(basics._current())
        return f"{first}.{same}"

    def _new_step(self) -> None:
        self._arrived.clear()
        self._handed.clear()
        self._sparse.clear()
        for p in self._delay:
            self._delay[p] = self.backward_passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on the gradients of so many backward passes are accumulated before they are reduced."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        for p in self._delay:
            self._delay[p] = passes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_delay"):
            self._hook()

    def step_alone(self) -> None:
        """The optimizer's own step on what ``p.grad`` holds: nothing is reduced."""
        super().step()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self._reducer is not None and self._reducer.running:
            if self._reducer.usable:
                self._reducer.finish()
            else:  # training goes on from here after a failure
                self._reducer.reset()
        self._new_step()
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own.

        Raises:
            AssertionError: between ``backward()`` and ``step()`` or ``synchronize()``.
        """
        if self._arrived:
            raise AssertionError(TOO_EARLY)
        self._hook()
        super().zero_grad(set_to_none)


class Follower:
    """What an optimizer does when this rank called ``hvd.join()``; see :mod:`hvdbridge.torch.joining`."""

    def __init__(self, optimizer: _Distributed) -> None:
        self._optimizer = optimizer

    def channel(self) -> tuple[int, str]:
        process_set = self._optimizer.process_set
        if process_set.process_set_id is None or not self._optimizer._active or self._optimizer._only_was():
            return -1, ""
        return asynchronous._number(process_set), f"channel.{self._optimizer._expected_name()}"

    def follow(self, step: int) -> None:
        with internal_errors():
            reducer = self._optimizer._ready() if step else None
            if reducer is None:
                self._optimizer._hook()
                reducer = self._optimizer._open()
            reducer.follow(step)

    def join(self, begins: bool) -> None:
        reducer = self._optimizer._ready()
        if reducer is not None and reducer.running:
            with internal_errors():
                if begins:
                    reducer.hand_in()
                else:
                    reducer.end_following()


class _DistributedOptimizer(_Distributed):
    """Reduces gradients, then steps."""

    def _complete(self, p: Tensor) -> None:
        reducer = self._ready()
        if reducer is not None:
            with internal_errors():
                reducer.gradient_of(p)
            if self._parameter_names[p] in reducer.sparse:
                self._sparse[self._parameter_names[p]] = self._send_sparse(reducer, self._parameter_names[p])
        elif len(self._handed) == len(self._delay):
            # All gradients are there, so it is known which are sparse. What is missing on some rank is known in
            # synchronize() only, which opens the channel otherwise.
            self._begin_opening(self._handed)

    def synchronize(self) -> None:
        """Wait until the reduced gradients stand in ``p.grad``; one that never came counts as what ``p.grad`` holds,
        or zeros.

        Raises:
            HorovodInternalError: a rank failed, or took too long.
            DifferentParameters (a HorovodInternalError and a RankMismatch): at the first call: ranks have other
                parameters, or other options.
            RuntimeError: another optimizer over some of its parameters was made after it.
        """
        self._check_place()
        if self._active:
            with internal_errors():
                self._reduce()
        self._new_step()
        self._synchronized = True

    def _reduce(self) -> None:
        if not self._delay and not self._hook():
            return  # all are frozen
        reducer = self._ready() or self._open(self._handed)
        if not self._synchronized:
            self._finish(reducer)
        self._hook()
        late = {self._parameter_names[p]: p for p in self._delay if self._parameter_names[p] not in reducer.params}
        if late:
            _, number, name = self._name()
            settings = replace(self._settings, groups=None)
            alone = Opening(late, (), settings, self.process_set, f"{name}.late", number).wait()
            self._finish(alone)
            alone.close()
            self._outgrown = True

    def _finish(self, reducer: OptimizerReducer) -> None:
        handles = {name: self._sparse.pop(name, None) or self._send_sparse(reducer, name) for name in reducer.sparse}
        reducer.finish()
        for name, handle in handles.items():
            reducer.params[name].grad = asynchronous.synchronize(handle)

    def _send_sparse(self, reducer: OptimizerReducer, name: str) -> Any:
        p, dims = reducer.params[name], reducer.sparse[name]
        gradient = p.grad
        if gradient is None:  # this rank did not use it
            indices = torch.empty((dims, 0), dtype=torch.int64, device=p.device)
            values = torch.empty((0, *p.shape[dims:]), dtype=p.dtype, device=p.device)
            gradient = torch.sparse_coo_tensor(indices, values, p.shape)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(dims)
        op = self.op if isinstance(self._settings.policy, Reduction) else Average
        return asynchronous.sparse_allreduce_async(gradient, name=name, op=op, process_set=self.process_set)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` within does not synchronize: ``optimizer.synchronize()`` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then the optimizer's own step. The gradients that ``closure`` computes are synchronized, too."""
        self._check_place()
        if self._should_synchronize and (closure is None or self._arrived):
            if self._synchronized:
                warnings.warn(TWICE, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        if closure is None:
            return super().step()
        return super().step(partial(self._evaluate, closure))

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if self._should_synchronize and self._arrived:
            self.synchronize()
            self._synchronized = False
        return loss


class _DistributedAdasumOptimizer(_Distributed):
    """Steps on each rank's own gradients, then combines what the steps changed."""

    def synchronize(self) -> None:
        """Nothing: it is steps that are combined, not gradients."""

    def skip_synchronize(self) -> Any:
        """Raises AssertionError: there is nothing to skip."""
        raise AssertionError("skip_synchronize() has no meaning with op=Adasum, which combines steps, not gradients")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's own step; every rank goes on from ``start + Adasum(changes of all ranks)``.

        Returns:
            What ``closure`` returned, before the step.

        Raises:
            RuntimeError: another optimizer over some of its parameters was made after it.
        """
        self._check_place()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hook()
        with internal_errors():
            reducer = self._ready()
            if reducer is None or len(reducer.names) < len(self._delay):
                reducer = self._open()
        for p in self._delay:
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # as Horovod's: momentum and weight decay act on it
        start = {name: p.detach().clone() for name, p in reducer.params.items()}
        super().step()
        with torch.no_grad(), internal_errors():
            changes = {name: p.detach() - start[name] for name, p in reducer.params.items()}
            sent = {name: self._rounded(change) for name, change in changes.items()}
            for name, combined in reducer.combine(sent).items():
                reducer.params[name].copy_(start[name].add_(combined))
        self._new_step()
        return loss

    def _rounded(self, change: Tensor) -> Tensor:
        """What compression leaves of it; dot products are taken of this, in wider types."""
        return self.compression.decompress(*self.compression.compress(change))  # type: ignore[no-any-return]


# Step hooks of torch run in the user's own step(), which these call; they would else run in these as well.
for _step in (_DistributedOptimizer.step, _DistributedAdasumOptimizer.step):
    setattr(_step, "hooked", True)  # noqa: B010


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    policy: str | Policy | None = None,
) -> Any:
    """An optimizer of the same class over the same parameter groups that combines gradients over the ranks of
    ``process_set`` before it steps. As Horovod's it begins without state: load a checkpoint into the result.

    Args:
        optimizer: any ``torch.optim.Optimizer``; use the result in its place.
        named_parameters: pairs of name and parameter, as ``model.named_parameters()``: by these ranks match them.
        compression: ``hvd.Compression.none``, ``.fp16``, or any class or object with ``compress`` and ``decompress``.
        backward_passes_per_step: gradients of so many backward passes are added up locally, then reduced.
        op: ``hvd.Average``, ``Sum``, ``Min``, ``Max``, ``Product``; ``Adasum`` combines steps instead of gradients.
        gradient_predivide_factor: with ``Average``: divide by this before the sum, and by ``size / this`` after it.
        num_groups: the former name of ``groups``.
        groups: a number of buckets, or lists of parameters that are to share one; other parameters then have their
            own. None: buckets of ``HVDBRIDGE_BUCKET_MB``, or of the size that a ``GradientSynchronizer`` takes.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that take part; on others it is the plain optimizer.
        policy: hvdbridge's own: a spec or a policy, in the place of ``op``, ``compression`` and
            ``gradient_predivide_factor``. None: what ``hb.init`` or ``HVDBRIDGE_POLICY`` says, if these three are not
            used, and it is not ``mean``.

    Methods beside the optimizer's own: ``synchronize``, ``skip_synchronize``, ``set_backward_passes_per_step``.

    Raises:
        ValueError: parameters without names, names twice, an option that cannot be meant, ``hvd.init()`` is missing.
        NotImplementedError: Adasum on a process set.
        Unsupported: a complex parameter.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average: it splits that division in two")
    if num_groups != 0:
        warnings.warn("num_groups is the former name of groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    check_groups(groups)
    delta = basics.size() > 1 and op == Adasum
    if delta and process_set is not global_process_set:
        raise NotImplementedError("Adasum takes the global process set only")
    if delta and policy is not None:
        raise ValueError(ONE_WAY)
    chosen = from_spec("adasum") if delta else choose_policy(policy, op, compression, gradient_predivide_factor)
    bucket_mb(basics._current(), chosen, ())  # refused here rather than within backward
    names = names_of(optimizer.param_groups, named_parameters)
    refuse_complex({name: p for p, name in names.items()})
    parent = _DistributedAdasumOptimizer if delta else _DistributedOptimizer
    kind: Any = type(type(optimizer).__name__, (parent, type(optimizer)), {"__module__": type(optimizer).__module__})
    made = kind.__new__(kind)
    made.__dict__.update(optimizer.__dict__)
    made.state = defaultdict(dict)
    made.__dict__.pop("step", None)  # a scheduler's wrapper around the step of what is wrapped here
    made.op, made.compression, made.process_set = op, compression, process_set
    made.gradient_predivide_factor, made.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    made.backward_passes_per_step = backward_passes_per_step
    made._setup(names, Settings(chosen, groups, sparse_as_dense))
    return made


def choose_policy(policy: str | Policy | None, op: Any, compression: Any, predivide: float) -> Policy:
    """The policy that these arguments, or the session, ask for."""
    if op != Adasum and op not in [known for known, _ in OPS]:
        raise ValueError(f"op={op!r} is not one of hvd.Average, Sum, Adasum, Min, Max, Product")
    plain = op == Average and compression is Compression.none and predivide == 1.0
    if policy is not None:
        if not plain:
            raise ValueError(ONE_WAY)
        return from_spec(policy)
    default = from_spec(runtime.current().policy)
    if label(default) == "mean":
        return Reduction(op, compression, predivide)
    if not plain:
        warnings.warn(
            f"the policy {label(default)!r} is not used: the script asks for an op or a compression of its own",
            stacklevel=3,
        )
        return Reduction(op, compression, predivide)
    return default


def names_of(
    param_groups: Sequence[Mapping[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """The name of each parameter.

    Raises:
        ValueError: not pairs, a name twice, or a parameter of the optimizer without a name.
    """
    if named_parameters is None:
        return {p: f"allreduce.noname.{i}.{j}" for i, g in enumerate(param_groups) for j, p in enumerate(g["params"])}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters takes tuples (name, parameter), as model.named_parameters() gives them")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"named_parameters: names must be unique, these occur twice: {', '.join(twice)}")
    found = {p: name for name, p in named}
    missing = [f"{i}.{j}" for i, g in enumerate(param_groups) for j, p in enumerate(g["params"]) if p not in found]
    if missing:
        raise ValueError(
            f"named_parameters names no parameter for {len(missing)} of the optimizer's (group.index): "
            f"{', '.join(missing[:8])}. Pass the names of all, or none."
        )
    return found


def check_groups(groups: Any) -> None:
    """Raises ValueError unless it is None, a number that is not negative, or lists of tensors, each in one."""
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    if not isinstance(groups, list):
        raise ValueError("groups takes a number that is not negative, or a list of lists of parameters")
    members = [p for group in groups for p in group]
    if any(not isinstance(p, Tensor) for p in members):
        raise ValueError("groups: its lists hold parameters (torch.Tensor)")
    if len(set(members)) < len(members):
        raise ValueError("groups: a parameter can be in one group only")


@contextmanager
def internal_errors() -> Iterator[None]:
    """The failure of another rank as what Horovod's users catch."""
    try:
        yield
    except Exception as error:
        # A library below says in its own words that a peer is gone; the monitor knows why.
        cause = runtime.current().monitor.cause_of(error)
        if isinstance(cause, (RankFailed, CollectiveTimeout)):
            raise internal_error(str(cause)) from error
        raise
