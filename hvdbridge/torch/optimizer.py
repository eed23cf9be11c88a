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

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hvdbridge.policies import from_spec
from hvdbridge.policy.base import Policy
from hvdbridge.policy.bucket import refuse_complex
from hvdbridge.torch import asynchronous, basics, joining
from hvdbridge.torch.basics import Adasum, Average
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.follower import Follower, internal_errors
from hvdbridge.torch.operations import Operations
from hvdbridge.torch.optimizer_options import (
    ONE_WAY,
    REPLACED,
    TOO_EARLY,
    TOO_OFTEN,
    TWICE,
    check_groups,
    choose_policy,
    names_of,
)
from hvdbridge.torch.optimizer_reducer import Opening, OptimizerReducer, Reduction, Settings, bucket_mb
from hvdbridge.torch.process_sets import ProcessSet, global_process_set

_reducing: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter and process set, the optimizer whose hook it has."""


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


