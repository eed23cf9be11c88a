"""GradientSynchronizer: aggregates a model's gradients over the ranks with one policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hvdbridge.backends import registry
from hvdbridge.errors import ConfigurationError, StepError, Unsupported
from hvdbridge.execution.state_store import OnResize
from hvdbridge.policies import from_spec, label
from hvdbridge.policies.dense import plain_mean
from hvdbridge.policies.wrappers import averaged
from hvdbridge.policy.base import Policy
from hvdbridge.reduction import parameters
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.autograd import refuse_compiled_autograd
from hvdbridge.reduction.bucket_size import check_rehearses, fastest_bucket_mb
from hvdbridge.reduction.context import ReductionContext, describe
from hvdbridge.reduction.parameters import Ignore, quoted
from hvdbridge.reduction.post_step import AfterStep
from hvdbridge.reduction.replicate import broadcast_optimizer, broadcast_tensors, shards_state
from hvdbridge.reduction.source import Options, closure_of, default_bucket_mb, front_end, prefer_bucket_views
from hvdbridge.reduction.wrapper import Wrapper, unwrapped
from hvdbridge.training import runtime, stopping
from hvdbridge.training.hook_state import Controls
from hvdbridge.training.sync_batchnorm import SyncBatchNorm

Optimizers = Optimizer | Sequence[Optimizer] | None


class GradientSynchronizer(Controls):
    """Aggregate a model's gradients over the ranks with one policy, on the session's backend.

    When ``backward()`` returns, ``p.grad`` holds the aggregated gradient on every rank. All ranks of the job pass the
    same arguments, except for ``group`` and ``ignore``. The constructor compares names, shapes, dtypes and options
    across the group. Then it copies the parameters, buffers and optimizer state of the group's first rank to all.

    Args:
        model: a module with at least one parameter that requires a gradient.
        optimizer: one optimizer, a list of optimizers, or None. :attr:`optimizer` has the same structure.
        policy: a spec string, a :class:`~hvdbridge.Policy`, or None for the policy given to ``hb.init``.
        bucket_mb: size of a gradient bucket in MiB. ``"auto"``: time several sizes for a few seconds, and use the
            fastest for this policy, model and network. None: ``HVDBRIDGE_BUCKET_MB``, or the policy's default
            (:func:`~hvdbridge.policies.dense.bucket_mb`: 25 as in DDP, or 10). Among several nodes the default is at
            most 10, or 5 for :attr:`bytewise <hvdbridge.Policy.bytewise>` policies. This limit does not apply over
            NCCL, where 100 replaces 10, to static graphs, or before torch 2.13. Results of policies that are not dense
            may depend on the size: pass the value of :attr:`bucket_mb` to reproduce a run. Policies of
            :attr:`Policy.scope <hvdbridge.Policy.scope>` ``"step"`` always have one bucket.
        group: the ranks that aggregate together: an iterable of ranks, the backend's own group, or None for all ranks.
            Every rank of the job constructs a synchronizer, each with the group that contains it.
        find_unused_parameters: True: a parameter to which no rank gave a gradient keeps its previous one. False:
            a backward that produces no gradient for some parameter raises an error.
        weighted: True: exchange :attr:`weight` in every step. False: never. None: the first step decides.
        static_graph, broadcast_buffers: as in torch's DistributedDataParallel.
        gradient_as_bucket_view: True: ``p.grad`` is a view of a bucket, which saves a copy. Pass False if the script
            keeps gradients beyond ``zero_grad()``, because the next step overwrites the view. None: choose the faster
            way by :func:`~hvdbridge.reduction.source.prefer_bucket_views`.
        seed: seed of the random numbers that all ranks share.
        ignore: names, patterns of names (``"head.*"``), parameters or buffers to leave out. They are neither copied
            from rank 0 nor compared nor aggregated, and their shapes may differ between ranks. Names passed to
            ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` are left out, too.
        broadcast: ``"all"``: copy all parameters and buffers from rank 0. ``"trainable"``: do not copy frozen
            parameters, which every rank must have loaded with equal values.
        wrapper: internal.

    Attributes:
        model: the module to train: a DistributedDataParallel on torch, else ``model`` itself.
        optimizer: the optimizer to step: a ``hvd.DistributedOptimizer`` on Horovod, else the given one.
        bucket_mb: size of a gradient bucket in MiB.

    Raises:
        NotInitialized: ``hb.init()`` was not called.
        RankMismatch: ranks differ in model, policy or options.
        ConfigurationError: an argument is invalid, the model has no trainable parameter or contains torch's
            DistributedDataParallel, or the policy is not defined for this number of ranks.
        StepError: another synchronizer aggregates this model, a part of it, or a module that contains it.
        Unsupported: the model has sparse gradients, or complex, lazy or sharded parameters.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizers = None,
        policy: str | Policy | None = None,
        bucket_mb: float | Literal["auto"] | None = None,
        group: Any = None,
        find_unused_parameters: bool = False,
        weighted: bool | None = None,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool | None = None,
        seed: int = 0,
        ignore: Ignore = None,
        broadcast: Literal["all", "trainable"] = "all",
        *,
        wrapper: Module | None = None,
    ) -> None:
        session = runtime.current()
        self._monitor = session.monitor
        self._monitor.starting = True
        self.policy = from_spec(session.policy if policy is None else policy)
        self._module = model = unwrapped(model)
        self._ignored = ignored = parameters.ignored_names(model, ignore)
        self._params = params = parameters.trainable(model, ignored)
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        tensors = {name: tensor for name, tensor in named if name not in ignored}
        refuse_model(model, params, tensors)
        if broadcast not in ("all", "trainable"):
            raise ConfigurationError(f"broadcast={broadcast!r} must be 'all' or 'trainable'")
        bucket_mb = session.config.bucket_mb if bucket_mb is None else bucket_mb
        explicit_mb = None if bucket_mb == "auto" else bucket_mb
        if explicit_mb is not None and (isinstance(explicit_mb, str) or not explicit_mb > 0):
            raise ConfigurationError(f"bucket_mb={bucket_mb!r} must be a positive number of MiB, 'auto' or None")
        if bucket_mb == "auto":
            check_rehearses(self.policy)
        self._wrapper, self._superseded = wrapper is not None, False
        self._open_synchronizers: list[GradientSynchronizer] = session.opened.setdefault("synchronizers", [])
        replace_earlier(self._open_synchronizers, model, params)
        self._context = ReductionContext.among(session, group, device_of(params))
        options = Options(
            self._default_bucket_mb(static_graph) if explicit_mb is None else explicit_mb,
            find_unused_parameters, static_graph, broadcast_buffers,
            prefer_bucket_views(params.values()) if gradient_as_bucket_view is None else gradient_as_bucket_view,
            explicit_size=explicit_mb is not None, single_bucket=self.policy.scope == "step", ignored=tuple(ignored),
            wrapper=wrapper,
        )  # fmt: skip
        optimizers = as_list(optimizer)
        compared = {"policy": label(self.policy), "options": options, "weighted": weighted, "seed": seed}
        compared |= {"bucket_mb": bucket_mb, "optimizers": len(optimizers), "broadcast": broadcast}
        self._context.agree(self.policy, describe(model, params, compared, ignored))
        self._broadcast_state([t for t in tensors.values() if broadcast == "all" or not frozen(t)], optimizers)
        self._attach(optimizers, bucket_mb == "auto", options, seed, weighted)
        self.optimizer = restructured(optimizer, self._optimizers)

    def _default_bucket_mb(self, static_graph: bool) -> float:
        communicator = self._context.communicator
        return default_bucket_mb(self.policy, communicator.nodes, communicator.capabilities.blocks_host, static_graph)

    def _broadcast_state(self, tensors: list[Tensor], optimizers: list[Optimizer]) -> None:
        """Copy rank 0's parameters, buffers and optimizer state to all ranks."""
        self._ignored_params = [p for name, p in self._module.named_parameters() if name in self._ignored]
        self._context.scheduler.run(broadcast_tensors(tensors), self._context.communicator)
        for optimizer in optimizers:
            broadcast_optimizer(optimizer, self._context.control, ignored=self._ignored_params)

    def _attach(
        self, originals: list[Optimizer], measure: bool, options: Options, seed: int, weighted: bool | None
    ) -> None:
        """Construct the aggregator and the gradient source, and register hooks on the model and its optimizers."""
        context, model, params = self._context, self._module, self._params
        session, communicator = context.session, context.communicator
        if measure:
            options = replace(options, bucket_mb=fastest_bucket_mb(self.policy, params, context, options.bucket_mb))
        self.bucket_mb = options.bucket_mb
        if weighted or not plain_mean(self.policy):  # DDP aggregates a plain mean
            context.open_graphs(self.policy, device_of(params))
        self._settings = self._aggregator = Aggregator(self.policy, params, context, seed, weighted)
        source_class = front_end(registry.entry(session.backend).front_end)
        self._source = source_class(model, originals, params, self._aggregator, options)
        self.model, self._optimizers = self._source.model, self._source.optimizers
        self._param_ids = set(map(id, [*params.values(), *self._ignored_params]))
        self._source.on_first_step = self._end_startup
        self._post_step = AfterStep(self._aggregator, params, self._optimizers, self.model)
        pairs = zip(originals, self._optimizers, strict=True)
        self._hooks = [old.register_step_pre_hook(partial(refuse_step, old)) for old, new in pairs if old is not new]
        self._hooks += [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        self._sync_batch_norms = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
        for norm in self._sync_batch_norms:
            norm.communicator = communicator.split([range(communicator.size)])
            norm.synchronizer = self
        self._key = str(next(session.opened.setdefault("keys", itertools.count())))
        self._closed = False
        self._open_synchronizers.append(self)
        session.at_shutdown(self.close)

    def check_in_use(self) -> None:
        """Check that this synchronizer may run a forward of its wrapper.

        Raises:
            StepError: the forward records gradients, but a newer wrapper aggregates the module's gradients.
        """
        if self._superseded and torch.is_grad_enabled():
            raise StepError(
                f"rank {self._context.control.rank}: forward of a DistributedDataParallel whose module was wrapped "
                "again since. Use the last wrapper."
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: the backwards of forwards within this block do not aggregate.

        As in DDP the forward decides. The next backward of a forward outside aggregates all that was accumulated.
        """
        previous = self._source.synchronizing
        self._source.synchronizing = False
        try:
            with getattr(self.model, "no_sync", nullcontext)():
                yield
        finally:
            self._source.synchronizing = previous

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train with unequal numbers of steps per rank.

        A rank that leaves the block's loop early shadows the steps of the others with weight 0. When all ranks have
        left, they copy the model and optimizer state of a rank that finished last. All ranks enter the block together
        and run one forward and one backward per step. Within the block an unset weight counts as 1.

        Raises:
            Unsupported: the model has a SyncBatchNorm, whose statistics need a forward on every rank; or an optimizer
                shards its state (ZeroRedundancyOptimizer).
        """
        if self._sync_batch_norms:
            raise Unsupported("join() with SyncBatchNorm: a rank without data makes no forward. Give it padding.")
        if any(map(shards_state, self._optimizers)):
            raise Unsupported(
                "join() with an optimizer whose state is sharded: a rank without data makes no step, and no other rank "
                "has its part. Give it padding."
            )
        aggregator = self._aggregator
        aggregator.joining = True
        start = self._source.steps
        try:
            with self._source.join():
                yield
            self._post_step.catch_up()
            self._aggregator.settle()
            counts = self._context.control.all_gather_object(self._source.steps - start)
            last = max(rank for rank, count in enumerate(counts) if count == max(counts))  # the rank that DDP chooses
            buffers = [buffer for name, buffer in self._module.named_buffers() if name not in self._ignored]
            flow = broadcast_tensors([*self._params.values(), *buffers], last)
            self._context.scheduler.run(flow, self._context.communicator)
            for optimizer in self._optimizers:
                broadcast_optimizer(optimizer, self._context.control, last, self._ignored_params)
        finally:
            aggregator.joining = aggregator.joined = False

    @property
    def stop_requested(self) -> bool:
        """True from the last step on, which is the same step on all ranks.

        A stop begins when any rank receives SIGTERM or SIGUSR1 or calls :func:`hvdbridge.stop`. Read this property
        once per step after ``optimizer.step()``, on all ranks; then save, and leave the loop::

            if sync.stop_requested:
                save()
                break

        The first read installs the signal handlers (:func:`hvdbridge.stop_on_signals`). With policies under which
        replicas drift, the last step is one that averages all parameters. A rank that shadows others within
        :meth:`join` agrees to any step, and reads True afterwards. Disjoint groups stop after the same number of steps.
        A read runs no collective; while ranks agree on the last step it may wait for a message's round trip.

        Raises:
            HvdbridgeError: the job failed.
        """
        stopping.stop_on_signals()
        step = self._aggregator.step
        return self._monitor.last_step_reached(self._key, step) and (step == 0 or averaged(self.policy, step - 1))

    def synchronize(self) -> None:
        """Raise the error of a failed aggregation, if there is one. It waits for nothing: ``backward()`` has done so.

        Raises:
            HvdbridgeError: the cause, if an aggregation failed.
        """
        self._context.scheduler.check_failure()

    def flush(self) -> bool:
        """Finish the work that the policy has postponed. Collective; without such work it has no effect.

        Call it at the end of training, and before collectives of your own if one rank may have skipped an optimizer's
        step. It finishes the average of ``local_sgd`` and ``diloco`` if one is due; between averages
        replicas stay different. It copies the aggregate that ``delayed`` holds to ``p.grad``.

        Returns:
            True if ``p.grad`` holds a postponed aggregate for one more ``optimizer.step()``. ``p.grad`` is None for
            parameters without one. False if there is no aggregate, or all its elements are zero.

        Raises:
            HvdbridgeError: the cause, if an aggregation failed.
        """
        self.synchronize()
        self._post_step.catch_up()
        updates = self._aggregator.flush()
        with torch.no_grad():
            for name, parameter in self._params.items() if updates else ():
                if name not in updates:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(updates[name])
        return bool(updates)

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        if gather:
            self._post_step.catch_up()
        return super().state_dict(gather)

    def load_state_dict(self, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
        super().load_state_dict(saved, on_resize)
        self._post_step.discard_due()

    def close(self) -> None:
        """Remove the hooks and free the communicators. Collective. Harmless when repeated.

        The model stays usable, and its gradients stay local. A new synchronizer may be constructed for :attr:`model`
        and :attr:`optimizer`, or for the module and optimizer that were passed to this one.
        """
        if self._closed:
            return
        self._closed = True
        self._end_startup()
        for hook in self._hooks:
            hook.remove()
        self._post_step.remove()
        self._open_synchronizers.remove(self)
        self._source.remove()
        for norm in self._sync_batch_norms:
            if norm.communicator is not None and self._context.scheduler.failure is None:
                norm.communicator.close()
            norm.communicator = norm.synchronizer = None
        self._context.session.forget_at_shutdown(self.close)
        self._context.close()

    def _end_startup(self) -> None:
        """End the start-up phase after the first step: from now on the ordinary time limit of waits applies."""
        self._monitor.starting = False

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = closure_of(args, kwargs)
        if closure is None:
            self._check_step(optimizer)
            return None
        self._post_step.before_closure()
        if getattr(closure, "checks_step", None) is self:  # Horovod's step() calls this hook twice
            return None

        def checked() -> Any:
            loss = closure()
            self._check_step(optimizer)
            return loss

        checked.checks_step = self  # type: ignore[attr-defined]
        if len(args) > 1:
            return (args[0], checked, *args[2:]), kwargs
        return args, kwargs | {"closure": checked}

    def _check_step(self, optimizer: Optimizer) -> None:
        self.synchronize()
        self._post_step.find_added()
        where = f"rank {self._context.control.rank}: optimizer.step()"
        if self._source.steps == 0:
            raise StepError(f"{where} before any synchronizing backward(): there are no aggregated gradients.")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if params and not any(id(p) in self._param_ids for p in params):
            raise StepError(
                f"{where} of an optimizer that holds none of the model's parameters: {quoted(self._names_of(params))}. "
                "Construct it over model.parameters(), after what replaces these."
            )
        foreign = [p for p in params if id(p) not in self._param_ids and p.grad is not None]
        if foreign:
            raise StepError(
                f"{where} with gradients of {len(foreign)} parameters that no synchronizer aggregates: "
                f"{quoted(self._names_of(foreign))}: unfrozen or added since, or not the model's. Construct the "
                "synchronizer anew, with a model that holds them; each synchronizer needs an optimizer of its own."
            )
        if self._source.accumulated:
            self._source.check_unaggregated("optimizer.step()")
        if self.skipped:
            for parameter in params:
                parameter.grad = None

    def _names_of(self, tensors: Sequence[Tensor]) -> list[str]:
        names = {p: name for name, p in self.model.named_parameters()} | self._source.names
        return [names.get(p, f"of shape {list(p.shape)}, not in the model") for p in tensors]


def replace_earlier(opened: list[GradientSynchronizer], model: Module, params: Mapping[str, Tensor]) -> None:
    """Close the synchronizer of an earlier wrapper around ``model``: two would aggregate the same gradients.

    Raises:
        StepError: a synchronizer without a wrapper aggregates ``model``, a part of it, or a module that contains it.
            Where the backend's hooks are on the module, each forward of one would count as a forward of the other.
    """
    modules = set(model.modules())
    for other in opened:
        if not other._wrapper and (other._module in modules or model in set(other._module.modules())):
            owned = set(other._params.values())
            raise StepError(
                f"{quoted(name for name, p in params.items() if p in owned)}: a GradientSynchronizer aggregates them "
                "already. Use it, or close() it first."
            )
    for other in [other for other in opened if other._module is model]:
        other.close()
        other._superseded = True


def device_of(params: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the scheduler's device: the first CUDA device among ``params``, else the first parameter's device."""
    devices = [p.device for p in params.values()]
    return next((device for device in devices if device.type == "cuda"), devices[0])


def refuse_step(replaced: Optimizer, optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Step pre-hook of a replaced optimizer. The optimizer that replaces it shares the hook, and may step."""
    if optimizer is replaced:
        raise StepError("step() of the optimizer that was wrapped. Use sync.optimizer: its gradients are aggregated.")


def refuse_model(model: Module, params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Check that the gradients of ``model`` can be aggregated.

    Args:
        params: the parameters to aggregate.
        tensors: the parameters and buffers to synchronize.

    Raises:
        ConfigurationError: the model contains torch's own DistributedDataParallel.
        Unsupported: some tensors are sharded or on the meta device, an optimizer of some ``params`` steps within
            backward, or compiled autograd is enabled.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and not isinstance(module, Wrapper):
            raise ConfigurationError(
                f"{name or 'the model'} is a DistributedDataParallel of torch's, which averages gradients by itself. "
                "Give the bare module: ddp.module."
            )
    refuse_compiled_autograd()
    parameters.refuse_unsupported_tensors(tensors)
    if names := [name for name, p in params.items() if hasattr(p, "_in_backward_optimizers")]:
        raise Unsupported(
            f"{quoted(names)}: _apply_optimizer_in_backward makes optimizers step by gradients of this rank alone, "
            "before they are aggregated. Let one optimizer step after backward()."
        )


def frozen(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a parameter that does not require a gradient."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def as_list(optimizer: Optimizers) -> list[Optimizer]:
    """Return the given optimizers as a list; None gives an empty one."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def restructured(optimizer: Optimizers, wrapped: list[Optimizer]) -> Any:
    """Return ``wrapped`` in the structure of ``optimizer``: None, one optimizer, or a sequence of the same type."""
    if optimizer is None:
        return None
    return wrapped[0] if isinstance(optimizer, Optimizer) else type(optimizer)(wrapped)  # type: ignore[call-arg]
