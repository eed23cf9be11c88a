"""Horovod's ``DistributedOptimizer``, over any backend.

Rules:

1. The result is an instance of a new subclass of the user's optimizer class, over the same parameter groups. Therefore
   ``isinstance`` checks and learning rate schedulers work.
2. Gradients are sent during backward, in flat buckets and in the scheduler's order. Ranks compare parameters once, when
   the channel opens, and negotiate nothing afterwards but sparse gradients, which are raw operations. The thread that
   opens the channel submits the first step's gradients, because ranks may differ in which of several optimizers steps
   first.
3. A step ends in ``synchronize()``, which ``step()`` calls. Only it, and a state that is loaded meanwhile, wait. Until
   then several backwards may run, each for other parameters. Other optimizers and operations may run in between, in
   another order on each rank. Each optimizer has its own channel and thread.
4. Results equal Horovod's bit by bit: the compressed gradient is sent, and the factor is applied to the sum. They are
   copied into the tensors in ``p.grad`` (sparse ones replace them), as in Horovod, because scripts keep references to
   them over ``zero_grad()``.
5. Construction sends nothing, so ranks that start later (:mod:`.elastic`) need not repeat it. After ``hvd.shutdown()``
   and ``hvd.init()`` the next step opens a new channel. Channels match by the name of a parameter, so optimizers may
   step first in any order.
6. The first step that finds unfrozen or added parameters reduces them in a separate channel. It keeps the old channel,
   because ranks differ in which gradients have arrived. The next step opens a channel for all parameters.
7. A joined rank contributes zeros to steps: :mod:`.joining`.
8. A policy's state is saved and loaded apart from the optimizer's: :mod:`.optimizer_state`.
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
from hvdbridge.policy.base import Policy, refuse_complex
from hvdbridge.torch import asynchronous, basics, joining
from hvdbridge.torch.basics import Adasum, Average
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.operations import Operations
from hvdbridge.torch.optimizer_options import Reduction, Settings, bucket_mb, check_options, choose_policy, names_of
from hvdbridge.torch.optimizer_reducer import OptimizerReducer, internal_errors
from hvdbridge.torch.optimizer_state import SavesPolicyState
from hvdbridge.torch.process_sets import ProcessSet, global_process_set

_reducing_optimizers: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The optimizer that reduces a parameter, by parameter and process set."""


class _Distributed(SavesPolicyState):
    """Base of both kinds of optimizers. It precedes the user's class in the method resolution order."""

    op: Any
    compression: Any
    process_set: ProcessSet
    backward_passes_per_step: int

    _parameter_names: dict[Tensor, str]
    """The name of each parameter. Scripts read this attribute of Horovod's."""

    def _setup(self, names: dict[Tensor, str], settings: Settings) -> None:
        self._parameter_names = names
        self._settings = settings
        self._opening: OptimizerReducer | None = None  # a reducer whose channel is being opened
        self._reducer: OptimizerReducer | None = None
        self._lacks_parameters = False  # whether the reducer lacks parameters, so the next step opens another
        self._in_flight: dict[str, Any] = {}  # handles of the sparse gradients that this step sent
        self._cached_id: tuple[Operations, int, str] | None = None
        self._passes: dict[Parameter, int] = {}  # number of backward passes that remain in this step
        self._has_gradients = False  # whether a gradient was accumulated since the last synchronize()
        self._synchronized = False  # whether p.grad holds reduced gradients
        self._should_synchronize = True
        self._hooks: list[Any] = []
        self._replaced = False
        self._add_hooks()
        self._follower = OptimizerFollower(self)
        joining.register(self._follower)

    @property
    def _active(self) -> bool:
        """Whether this rank reduces gradients. A single rank only does so with a policy of the user's own."""
        alone = basics.size() == 1 and isinstance(self._settings.policy, Reduction)
        return not alone and bool(self.process_set.included())

    def _add_hooks(self) -> bool:
        """Hook parameters that require gradients and have no hook. Return whether any parameter has a hook."""
        for i, group in enumerate(() if self._replaced else self.param_groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and p not in self._passes:
                    self._parameter_names.setdefault(p, f"allreduce.noname.{i}.{j}")
                    self._passes[p] = self.backward_passes_per_step
                    self._take_over(p)
        return bool(self._passes)

    def _take_over(self, p: Tensor) -> None:
        """Hook ``p``, and replace the optimizer that reduced it over the same ranks, because two would reduce it twice.
        The replaced optimizer stops to reduce all its parameters. The hook keeps this optimizer alive."""
        by_set = _reducing_optimizers.setdefault(p, WeakValueDictionary())
        if (previous := by_set.get(self.process_set)) is not None:
            previous._replaced = True
            while previous._hooks:
                previous._hooks.pop().remove()
        by_set[self.process_set] = self
        self._hooks.append(p.register_post_accumulate_grad_hook(self._on_gradient))

    def _check_not_replaced(self) -> None:
        if self._replaced:
            raise RuntimeError(
                "another DistributedOptimizer over some of this one's parameters was made after it, and reduces them "
                "in its place. Use that, or give each optimizer parameters of its own."
            )

    def _on_gradient(self, p: Any) -> None:
        """Count the gradient of ``p``; the hook that autograd calls after it accumulated the gradient."""
        if not self._active:
            return
        if self._passes[p] <= 0:
            raise AssertionError(
                f"Gradients of {self._parameter_names[p]!r} were computed more than backward_passes_per_step times "
                "before step() or synchronize(). Pass a larger backward_passes_per_step to accumulate them."
            )
        if p.grad is not None and p.grad.requires_grad:
            name = self._parameter_names[p]
            raise AssertionError(f"backward(create_graph=True): the gradient of {name!r} cannot be reduced")
        self._passes[p] -= 1
        self._has_gradients, self._synchronized = True, False
        if self._passes[p] == 0:
            self._on_last_gradient(p)

    def _on_last_gradient(self, p: Tensor) -> None:
        """Handle the last gradient of ``p`` in this step."""

    @property
    def _complete_parameters(self) -> list[Tensor]:
        """The parameters whose gradients are complete in this step."""
        return [p for p, passes in self._passes.items() if passes == 0]

    def _usable_reducer(self) -> OptimizerReducer | None:
        """Return the reducer if it belongs to the open session and has all parameters, else None."""
        reducer = self._reducer
        usable = reducer is not None and reducer.operations is basics._operations and not self._lacks_parameters
        return reducer if usable else None

    def _start_opening(self, arrived: Iterable[Tensor]) -> OptimizerReducer:
        """Return the reducer whose channel is being opened; start to open one if there is none."""
        if self._opening is None or self._opening.stale:
            params = {self._parameter_names[p]: p for p in self._passes}
            channel_id = self._channel_id()[1:]
            self._opening = OptimizerReducer(
                params, arrived, self._settings, self.process_set, *channel_id, loaded=self._loaded
            )
        return self._opening

    def _open(self, arrived: Iterable[Tensor] = ()) -> OptimizerReducer:
        """Open and return a reducer of the hooked parameters, which takes the gradients of ``arrived``; collective."""
        try:
            reducer = self._start_opening(arrived).wait()
        finally:
            self._opening = None
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._lacks_parameters, self._loaded = reducer, False, None
        return reducer

    def _channel_id(self, reserve: bool = True) -> tuple[Operations, int, str]:
        """Return the session's operations, this optimizer's number in reports, and the channel's name.

        The name is the least of the parameters' names, and a number that distinguishes optimizers of the same name.
        Without ``reserve`` the number stays available, because only joined ranks query the name of the next channel.
        """
        operations = basics._current()
        if self._cached_id is not None and self._cached_id[0] is operations:
            return self._cached_id
        key = asynchronous._process_set_id(self.process_set), min(self._parameter_names.values(), default="")
        count = operations.optimizers.get(key, 0) + 1
        channel_id = operations, sum(operations.optimizers.values()) + 1, f"{key[1]}.{count}"
        if reserve:
            operations.optimizers[key] = count
            self._cached_id = channel_id
        return channel_id

    def _new_step(self) -> None:
        """Expect the gradients of a new step."""
        self._has_gradients = False
        self._in_flight.clear()
        self._passes = dict.fromkeys(self._passes, self.backward_passes_per_step)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are accumulated before each reduction.

        Raises:
            ValueError: ``passes`` is not positive.
        """
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        self._passes = dict.fromkeys(self._passes, passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_passes"):
            self._add_hooks()

    def step_alone(self) -> None:
        """Make the user's optimizer's step with the values in ``p.grad``, without a reduction."""
        super().step()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self._reducer is not None and self._reducer.running:
            if self._reducer.usable:
                self._reducer.finish()
            else:  # the script resumes after a failure
                self._reducer.reset()
        self._new_step()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as the user's optimizer does.

        Raises:
            AssertionError: called between ``backward()`` and ``step()`` or ``synchronize()``.
        """
        if self._has_gradients:
            raise AssertionError(
                "optimizer.zero_grad() between loss.backward() and optimizer.step() or optimizer.synchronize(): "
                "gradients are on their way to other ranks. Call it after one of these, or before loss.backward()."
            )
        self._add_hooks()
        super().zero_grad(set_to_none)


class _DistributedOptimizer(_Distributed):
    """Reduces the gradients over the ranks, then steps."""

    def _on_last_gradient(self, p: Tensor) -> None:
        reducer, name = self._usable_reducer(), self._parameter_names[p]
        if reducer is not None:
            with internal_errors():
                reducer.gradient_of(p)
            if name in reducer.sparse:
                self._in_flight[name] = self._send_sparse(reducer, name)
        elif not any(self._passes.values()):
            # With all gradients complete, this rank knows which are sparse. If a parameter gets no gradient in this
            # step, synchronize() opens the channel.
            self._start_opening(self._complete_parameters)

    def synchronize(self) -> None:
        """Wait until ``p.grad`` holds the reduced gradients.

        A parameter without a new gradient contributes the present value of ``p.grad``, or zeros.

        Raises:
            HorovodInternalError: a rank failed, or exceeded the time limit.
            DifferentParameters (a HorovodInternalError and a RankMismatch): parameters or options differ between ranks;
                raised by the first call.
            RuntimeError: a later optimizer over some of these parameters has replaced this one.
        """
        self._check_not_replaced()
        if self._active and (self._passes or self._add_hooks()):
            with internal_errors():
                self._reduce()
        self._new_step()
        self._synchronized = True

    def _reduce(self) -> None:
        """Finish the step in the open channel, then reduce unfrozen and added parameters (rule 6)."""
        reducer = self._usable_reducer() or self._open(self._complete_parameters)
        if not self._synchronized:
            self._finish_step(reducer)
        self._add_hooks()
        late = {self._parameter_names[p]: p for p in self._passes if self._parameter_names[p] not in reducer.params}
        if late:
            _, number, name = self._channel_id()
            settings = replace(self._settings, groups=None)
            extra = OptimizerReducer(late, (), settings, self.process_set, number, f"{name}.late").wait()
            self._finish_step(extra)
            extra.close()
            self._lacks_parameters = True

    def _finish_step(self, reducer: OptimizerReducer) -> None:
        """Wait for the reducer's gradients and for sparse ones, and write them into ``p.grad``."""
        handles = {name: self._in_flight.pop(name, None) or self._send_sparse(reducer, name) for name in reducer.sparse}
        reducer.finish()
        for name, handle in handles.items():
            reducer.params[name].grad = asynchronous.synchronize(handle)

    def _send_sparse(self, reducer: OptimizerReducer, name: str) -> Any:
        """Start to reduce a gradient that is sparse on any rank; return the handle."""
        p, dims = reducer.params[name], reducer.sparse[name]
        gradient = p.grad
        if gradient is None:  # this rank did not use the parameter
            indices = torch.empty((dims, 0), dtype=torch.int64, device=p.device)
            gradient = torch.sparse_coo_tensor(indices, p.new_empty(0, *p.shape[dims:]), p.shape)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(dims)
        op = self.op if isinstance(self._settings.policy, Reduction) else Average
        return asynchronous.sparse_allreduce_async(gradient, name=name, op=op, process_set=self.process_set)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Disable the synchronization in ``step()`` within the block, after a call of ``optimizer.synchronize()``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then make the optimizer's step. Gradients that ``closure`` computes are synchronized, too.

        Raises:
            HorovodInternalError, RuntimeError: see :meth:`synchronize`.
        """
        self._check_not_replaced()
        if self._should_synchronize and (closure is None or self._has_gradients):
            if self._synchronized:
                warnings.warn(  # begins like Horovod's warning, because scripts filter by its text
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): write 'with optimizer.skip_synchronize(): optimizer.step()', which says "
                    "that gradients are complete.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        if closure is None:
            return super().step()
        return super().step(partial(self._evaluate_closure, closure))

    def _evaluate_closure(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if self._should_synchronize and self._has_gradients:
            self.synchronize()
            self._synchronized = False
        return loss


class _DistributedAdasumOptimizer(_Distributed):
    """Steps with each rank's own gradients, then combines the parameters' changes of all ranks by Adasum."""

    def synchronize(self) -> None:
        """Do nothing, because ranks combine steps, not gradients."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError, because ``step()`` never calls :meth:`synchronize`."""
        raise AssertionError("skip_synchronize() has no meaning with op=Adasum, which combines steps, not gradients")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the optimizer's step, then set parameters to ``start + Adasum(changes of all ranks)``; collective.

        Returns:
            The return value of ``closure``, which is called before the step; None without one.

        Raises:
            HorovodInternalError: a rank failed, or exceeded the time limit.
            RuntimeError: a later optimizer over some of these parameters has replaced this one.
        """
        self._check_not_replaced()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._add_hooks()
        with internal_errors():
            reducer = self._usable_reducer()
            if reducer is None or len(reducer.params) < len(self._passes):
                reducer = self._open()
        for p in self._passes:
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # as in Horovod: momentum and weight decay act on it
        saved = {p: (p.grad, p.detach().clone()) for p in reducer.params.values()}
        super().step()
        with torch.no_grad(), internal_errors():
            try:
                for p, (_, start) in saved.items():
                    p.grad = self._round_trip(p.detach() - start).to(p.dtype)
                reducer.finish()
                for p, (_, start) in saved.items():
                    p.copy_(start.add_(p.grad))  # type: ignore[arg-type]
            finally:
                for p, (gradient, _) in saved.items():
                    p.grad = gradient
        self._new_step()
        return loss

    def _round_trip(self, change: Tensor) -> Tensor:
        """Return ``change`` compressed and decompressed. Adasum itself computes in wider dtypes."""
        return self.compression.decompress(*self.compression.compress(change))  # type: ignore[no-any-return]


# Torch's step hooks run in the user's step(), which these call. This mark keeps them from running twice.
for _step in (_DistributedOptimizer.step, _DistributedAdasumOptimizer.step):
    setattr(_step, "hooked", True)  # noqa: B010


class OptimizerFollower:
    """The :class:`hvdbridge.torch.joining.Follower` of a ``DistributedOptimizer``."""

    def __init__(self, optimizer: _Distributed) -> None:
        self._optimizer = optimizer

    def channel(self) -> tuple[int, str]:
        optimizer, named = self._optimizer, self._optimizer._cached_id
        # A replaced optimizer without a channel in this session never opens one.
        unused = optimizer._replaced and (named is None or named[0] is not basics._current())
        if optimizer.process_set.process_set_id is None or not optimizer._active or unused:
            return -1, ""
        return asynchronous._process_set_id(optimizer.process_set), f"channel.{optimizer._channel_id(reserve=False)[2]}"

    def follow(self, step: int) -> None:
        with internal_errors():
            reducer = self._optimizer._usable_reducer() if step else None
            if reducer is None:
                self._optimizer._add_hooks()
                reducer = self._optimizer._open()
            reducer.follow(step)

    def join(self, begins: bool) -> None:
        reducer = self._optimizer._usable_reducer()
        if reducer is not None and reducer.running:
            with internal_errors():
                if begins:
                    reducer.submit_all()
                else:
                    reducer.end_following()


def DistributedOptimizer(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: Any = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None, sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set, policy: str | Policy | None = None,
) -> Any:  # fmt: skip
    """Return an optimizer that reduces gradients over the ranks before each step.

    The result is an instance of a subclass of ``optimizer``'s class, over the same parameter groups. As in Horovod, its
    state is empty: load a checkpoint into the result.

    Args:
        optimizer: any ``torch.optim.Optimizer``; use the result in its place.
        named_parameters: pairs of name and parameter, as ``model.named_parameters()``; ranks match parameters by name.
        compression: ``hvd.Compression.none``, ``.fp16``, or any class or object with ``compress`` and ``decompress``.
        backward_passes_per_step: number of backward passes whose gradients are summed locally before each reduction.
        op: ``hvd.Average``, ``Sum``, ``Min``, ``Max``, ``Product``; ``Adasum`` combines steps instead of gradients.
        gradient_predivide_factor: divisor before the sum; the sum is divided by ``size / divisor``. Needs ``Average``.
        num_groups: deprecated name of ``groups``.
        groups: number of buckets, or a list of lists of parameters that share a bucket; every other parameter then has
            its own bucket. None: buckets of ``HVDBRIDGE_BUCKET_MB``, by default as in a ``GradientSynchronizer``.
        sparse_as_dense: whether to reduce sparse gradients as dense ones.
        process_set: the ranks that take part; on others the result acts as the plain optimizer.
        policy: addition of hvdbridge: a spec or a policy, in place of ``op``, ``compression`` and
            ``gradient_predivide_factor``. None: the policy of ``hb.init`` or ``HVDBRIDGE_POLICY``, if it is not
            ``mean`` and these three have their defaults.

    The result has the further methods ``synchronize``, ``skip_synchronize`` and ``set_backward_passes_per_step``, and
    hvdbridge's ``policy_state_dict`` and ``load_policy_state_dict``.

    Raises:
        ValueError: parameters lack names, names repeat, options are invalid, or ``hvd.init()`` was not called.
        ConfigurationError (a ValueError): the policy is unknown, or acts after the optimizer's step.
        NotImplementedError: Adasum on a process set.
        Unsupported: a parameter is complex.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if num_groups != 0:
        warnings.warn("num_groups is the former name of groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    delta = basics.size() > 1 and op == Adasum
    check_options(op, gradient_predivide_factor, backward_passes_per_step, groups, policy, process_set, delta)
    chosen = from_spec("adasum") if delta else choose_policy(policy, op, compression, gradient_predivide_factor)
    bucket_mb(basics._current(), chosen, ())  # raises for an invalid configuration here rather than within backward
    names = names_of(optimizer.param_groups, named_parameters)
    refuse_complex({name: p for p, name in names.items()})
    parent = _DistributedAdasumOptimizer if delta else _DistributedOptimizer
    kind: Any = type(type(optimizer).__name__, (parent, type(optimizer)), {"__module__": type(optimizer).__module__})
    result = kind.__new__(kind)
    result.__dict__.update(
        optimizer.__dict__, state=defaultdict(dict), op=op, compression=compression, process_set=process_set,
        gradient_predivide_factor=gradient_predivide_factor, sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
    )  # fmt: skip
    result.__dict__.pop("step", None)  # a scheduler's wrapper around the step of ``optimizer``
    result._setup(names, Settings(chosen, groups, sparse_as_dense or delta))  # changes are dense
    return result
