"""Horovod's ``DistributedOptimizer``, over any backend.

Rules:

1. The result is a new subclass of the user's optimizer class, around the same parameter groups: ``isinstance`` and
   schedulers see what they know.
2. Gradients travel while backward runs, in flat buckets and in the scheduler's order. Ranks compare names once, when
   the channel opens, and do not negotiate again. The thread that opens the channel hands the first step's gradients
   in: ranks may differ in which of several optimizers steps first.
3. A step ends in ``synchronize()``, which ``step()`` calls; nothing waits for other ranks before. Until then several
   backwards may run, each for other parameters. Other optimizers and operations may come between, in another order
   on each rank. Each optimizer has a channel and a thread of its own.
4. The bits are Horovod's: the compressed gradient travels, and the factor is applied to the sum. The tensors are
   Horovod's, too: results are copied into the gradients that backward made, which scripts hold over ``zero_grad()``.
5. Construction sends nothing, so ranks that join later (:mod:`.elastic`) need not repeat it. After ``hvd.shutdown()``
   and ``hvd.init()`` the next step opens a new channel. Its name is made of a parameter's name, by which optimizers
   match, whichever steps first.
6. The first step that finds unfrozen or added parameters reduces them by themselves. Ranks differ in which gradients
   of that step have arrived, so it keeps the old channel. The next step opens another channel, for all parameters.
7. A rank that joined takes part in steps with zeros: :mod:`.joining`.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

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
from hvdbridge.torch.operations import Operations
from hvdbridge.torch.optimizer_options import Reduction, Settings, bucket_mb, check_options, choose_policy, names_of
from hvdbridge.torch.optimizer_reducer import OptimizerReducer, internal_errors
from hvdbridge.torch.process_sets import ProcessSet, global_process_set

_reducing: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter and process set, the optimizer that reduces it."""


class _Distributed(Optimizer):
    """Base of both kinds of optimizers; stands before the user's class in the order of resolution."""

    op: Any
    compression: Any
    process_set: ProcessSet
    backward_passes_per_step: int

    _parameter_names: dict[Tensor, str]
    """As Horovod's, which scripts read."""

    def _setup(self, names: dict[Tensor, str], settings: Settings) -> None:
        self._parameter_names = names
        self._settings = settings
        self._opening: OptimizerReducer | None = None  # asked for, and not waited for
        self._reducer: OptimizerReducer | None = None
        self._outgrown = False  # the reducer lacks parameters: the next step opens another
        self._sparse: dict[str, Any] = {}  # handles of the sparse gradients that this step sent
        self._named: tuple[Operations, int, str] | None = None
        self._delay: dict[Parameter, int] = {}  # how many backward passes of this step are to come
        self._arrived = False  # a gradient came since the last synchronize()
        self._synchronized = False  # p.grad holds what synchronize() promises
        self._should_synchronize = True
        self._hooks: list[Any] = []
        self._replaced = False
        self._hook()
        self._follower = Follower(self)
        joining.add(self._follower)

    @property
    def _active(self) -> bool:
        """Whether there are ranks to reduce with. Alone, only a policy of the user's own has something to do."""
        alone = basics.size() == 1 and isinstance(self._settings.policy, Reduction)
        return not alone and bool(self.process_set.included())

    def _hook(self) -> bool:
        """Hook parameters that require gradients and have no hook; return whether any parameter has one."""
        for i, group in enumerate(() if self._replaced else self.param_groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and p not in self._delay:
                    self._parameter_names.setdefault(p, f"allreduce.noname.{i}.{j}")
                    self._delay[p] = self.backward_passes_per_step
                    self._take(p)
        return bool(self._delay)

    def _take(self, p: Tensor) -> None:
        """Reduce ``p`` in place of the optimizer that reduced it among the same ranks: two would reduce it twice. That
        one gives way with all parameters, on all ranks alike. The hook keeps the last one alive."""
        by_set = _reducing.setdefault(p, WeakValueDictionary())
        if (earlier := by_set.get(self.process_set)) is not None:
            earlier._replaced = True
            while earlier._hooks:
                earlier._hooks.pop().remove()
        by_set[self.process_set] = self
        self._hooks.append(p.register_post_accumulate_grad_hook(self._gradient))

    def _check_place(self) -> None:
        if self._replaced:
            raise RuntimeError(
                "another DistributedOptimizer over some of this one's parameters was made after it, and reduces them "
                "in its place. Use that, or give each optimizer parameters of its own."
            )

    def _gradient(self, p: Any) -> None:
        """Called by autograd after it accumulated the gradient of ``p``."""
        if not self._active:
            return
        if self._delay[p] <= 0:
            raise AssertionError(
                f"Gradients of {self._parameter_names[p]!r} were computed more than backward_passes_per_step times "
                "before step() or synchronize(). Pass a larger backward_passes_per_step to accumulate them."
            )
        if p.grad is not None and p.grad.requires_grad:
            name = self._parameter_names[p]
            raise AssertionError(f"backward(create_graph=True): the gradient of {name!r} cannot be reduced")
        self._delay[p] -= 1
        self._arrived, self._synchronized = True, False
        if self._delay[p] == 0:
            self._complete(p)

    def _complete(self, p: Tensor) -> None:
        """The last gradient of this step for ``p``."""

    @property
    def _handed(self) -> list[Tensor]:
        """The parameters whose gradients are complete in this step."""
        return [p for p, left in self._delay.items() if left == 0]

    def _ready(self) -> OptimizerReducer | None:
        """The reducer, if it belongs to the open session and has all parameters."""
        reducer = self._reducer
        fits = reducer is not None and reducer.operations is basics._operations and not self._outgrown
        return reducer if fits else None

    def _begin_opening(self, arrived: Iterable[Tensor]) -> OptimizerReducer:
        """Ask for a channel, if that has not happened."""
        if self._opening is None or self._opening.stale:
            params = {self._parameter_names[p]: p for p in self._delay}
            self._opening = OptimizerReducer(params, arrived, self._settings, self.process_set, *self._name()[1:])
        return self._opening

    def _open(self, arrived: Iterable[Tensor] = ()) -> OptimizerReducer:
        """A reducer of the hooked parameters, which takes the gradients of ``arrived``; collective."""
        try:
            reducer = self._begin_opening(arrived).wait()
        finally:
            self._opening = None
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._outgrown = reducer, False
        return reducer

    def _name(self, take: bool = True) -> tuple[Operations, int, str]:
        """The session, this optimizer's number in messages, and the channel's name.

        The name is that of a parameter, whatever their order, and a number where several optimizers share it. Without
        ``take`` it is the name that a channel would get now: not all ranks look, so a look takes no number.
        """
        operations = basics._current()
        if self._named is not None and self._named[0] is operations:
            return self._named
        shared = asynchronous._number(self.process_set), min(self._parameter_names.values(), default="")
        same = operations.optimizers.get(shared, 0) + 1
        named = operations, sum(operations.optimizers.values()) + 1, f"{shared[1]}.{same}"
        if take:
            operations.optimizers[shared] = same
            self._named = named
        return named

    def _new_step(self) -> None:
        self._arrived = False
        self._sparse.clear()
        self._delay = dict.fromkeys(self._delay, self.backward_passes_per_step)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate the gradients of ``passes`` backward passes before each reduction from now on."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        self._delay = dict.fromkeys(self._delay, passes)

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
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own.

        Raises:
            AssertionError: between ``backward()`` and ``step()`` or ``synchronize()``.
        """
        if self._arrived:
            raise AssertionError(
                "optimizer.zero_grad() between loss.backward() and optimizer.step() or optimizer.synchronize(): "
                "gradients are on their way to other ranks. Call it after one of these, or before loss.backward()."
            )
        self._hook()
        super().zero_grad(set_to_none)


class _DistributedOptimizer(_Distributed):
    """Reduces gradients, then steps."""

    def _complete(self, p: Tensor) -> None:
        reducer, name = self._ready(), self._parameter_names[p]
        if reducer is not None:
            with internal_errors():
                reducer.gradient_of(p)
            if name in reducer.sparse:
                self._sparse[name] = self._send_sparse(reducer, name)
        elif not any(self._delay.values()):
            # With all gradients there, this rank knows which are sparse. Only synchronize() knows that a gradient will
            # not come, and opens the channel otherwise.
            self._begin_opening(self._handed)

    def synchronize(self) -> None:
        """Wait until ``p.grad`` holds the reduced gradients. A gradient that never came counts as what ``p.grad``
        holds, or zeros.

        Raises:
            HorovodInternalError: a rank failed, or took too long.
            DifferentParameters (a HorovodInternalError and a RankMismatch): at the first call: ranks have other
                parameters, or other options.
            RuntimeError: another optimizer over some of its parameters was made after it.
        """
        self._check_place()
        if self._active and (self._delay or self._hook()):
            with internal_errors():
                self._reduce()
        self._new_step()
        self._synchronized = True

    def _reduce(self) -> None:
        reducer = self._ready() or self._open(self._handed)
        if not self._synchronized:
            self._finish(reducer)
        self._hook()
        late = {self._parameter_names[p]: p for p in self._delay if self._parameter_names[p] not in reducer.params}
        if late:
            _, number, name = self._name()
            settings = replace(self._settings, groups=None)
            alone = OptimizerReducer(late, (), settings, self.process_set, number, f"{name}.late").wait()
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
            gradient = torch.sparse_coo_tensor(indices, p.new_empty(0, *p.shape[dims:]), p.shape)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(dims)
        op = self.op if isinstance(self._settings.policy, Reduction) else Average
        return asynchronous.sparse_allreduce_async(gradient, name=name, op=op, process_set=self.process_set)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within the block ``step()`` does not synchronize: the script has called ``optimizer.synchronize()``."""
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
                warnings.warn(  # begins as Horovod's warning, by which scripts filter it
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): write 'with optimizer.skip_synchronize(): optimizer.step()', which says "
                    "that gradients are complete.",
                    stacklevel=2,
                )
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
    """Steps on each rank's own gradients, then combines the changes that the steps made."""

    def synchronize(self) -> None:
        """Does nothing: ranks combine steps, not gradients."""

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
            if reducer is None or len(reducer.params) < len(self._delay):
                reducer = self._open()
        for p in self._delay:
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # as Horovod's: momentum and weight decay act on it
        gradients = {p: (p.grad, p.detach().clone()) for p in reducer.params.values()}
        super().step()
        with torch.no_grad(), internal_errors():
            try:
                for p, (_, start) in gradients.items():
                    p.grad = self._rounded(p.detach() - start).to(p.dtype)
                reducer.finish()
                for p, (_, start) in gradients.items():
                    p.copy_(start.add_(p.grad))  # type: ignore[arg-type]
            finally:
                for p, (gradient, _) in gradients.items():
                    p.grad = gradient
        self._new_step()
        return loss

    def _rounded(self, change: Tensor) -> Tensor:
        """``change`` as compression leaves it; dot products of it are computed in wider types."""
        return self.compression.decompress(*self.compression.compress(change))  # type: ignore[no-any-return]


# Step hooks of torch run in the user's own step(), which these call; they would else run in these as well.
for _step in (_DistributedOptimizer.step, _DistributedAdasumOptimizer.step):
    setattr(_step, "hooked", True)  # noqa: B010


class Follower:
    """Takes part in an optimizer's steps after this rank called ``hvd.join()``; see :mod:`hvdbridge.torch.joining`."""

    def __init__(self, optimizer: _Distributed) -> None:
        self._optimizer = optimizer

    def channel(self) -> tuple[int, str]:
        optimizer, named = self._optimizer, self._optimizer._named
        # A replaced optimizer without a channel in this session will never open one.
        unused = optimizer._replaced and (named is None or named[0] is not basics._current())
        if optimizer.process_set.process_set_id is None or not optimizer._active or unused:
            return -1, ""
        return asynchronous._number(optimizer.process_set), f"channel.{optimizer._name(take=False)[2]}"

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


def DistributedOptimizer(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: Any = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None, sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set, policy: str | Policy | None = None,
) -> Any:  # fmt: skip
    """An optimizer of the same class over the same parameter groups that combines gradients over the ranks of
    ``process_set`` before it steps. As Horovod's it begins without state: load a checkpoint into the result.

    Args:
        optimizer: any ``torch.optim.Optimizer``; use the result in its place.
        named_parameters: pairs of name and parameter, as ``model.named_parameters()``; ranks match parameters by name.
        compression: ``hvd.Compression.none``, ``.fp16``, or any class or object with ``compress`` and ``decompress``.
        backward_passes_per_step: this rank adds up the gradients of so many backward passes before each reduction.
        op: ``hvd.Average``, ``Sum``, ``Min``, ``Max``, ``Product``; ``Adasum`` combines steps instead of gradients.
        gradient_predivide_factor: with ``Average``: divide by this before the sum, and by ``size / this`` after it.
        num_groups: the former name of ``groups``.
        groups: a number of buckets, or lists of parameters that share one; each other parameter then has its own. None:
            buckets of ``HVDBRIDGE_BUCKET_MB``, or of the size that a ``GradientSynchronizer`` takes.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that take part; on others the result acts as the plain optimizer.
        policy: hvdbridge's own: a spec or a policy, in the place of ``op``, ``compression`` and
            ``gradient_predivide_factor``. None: the policy of ``hb.init`` or ``HVDBRIDGE_POLICY``, if it is not
            ``mean`` and these three have their defaults.

    Methods beside the optimizer's own: ``synchronize``, ``skip_synchronize``, ``set_backward_passes_per_step``.

    Raises:
        ValueError: parameters without names, names twice, an option without meaning, ``hvd.init()`` is missing.
        NotImplementedError: Adasum on a process set.
        Unsupported: a complex parameter.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if num_groups != 0:
        warnings.warn("num_groups is the former name of groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    delta = basics.size() > 1 and op == Adasum
    check_options(op, gradient_predivide_factor, backward_passes_per_step, groups, policy, process_set, delta)
    chosen = from_spec("adasum") if delta else choose_policy(policy, op, compression, gradient_predivide_factor)
    bucket_mb(basics._current(), chosen, ())  # refused here rather than within backward
    names = names_of(optimizer.param_groups, named_parameters)
    refuse_complex({name: p for p, name in names.items()})
    parent = _DistributedAdasumOptimizer if delta else _DistributedOptimizer
    kind: Any = type(type(optimizer).__name__, (parent, type(optimizer)), {"__module__": type(optimizer).__module__})
    made = kind.__new__(kind)
    made.__dict__.update(
        optimizer.__dict__, state=defaultdict(dict), op=op, compression=compression, process_set=process_set,
        gradient_predivide_factor=gradient_predivide_factor, sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
    )  # fmt: skip
    made.__dict__.pop("step", None)  # a scheduler's wrapper around the step of ``optimizer``
    made._setup(names, Settings(chosen, groups, sparse_as_dense or delta))  # changes are dense
    return made
