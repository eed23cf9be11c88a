"""The GradientSynchronizer joins a source of gradients, a policy, its state and a scheduler."""

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
from hvdbridge.policies.wrappers import averaged
from hvdbridge.policy.base import Policy
from hvdbridge.reduction import parameters
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.autograd import refuse_compiled_autograd
from hvdbridge.reduction.bucket_size import check_rehearses, fastest_bucket_mb
from hvdbridge.reduction.context import ReductionContext, describe
from hvdbridge.reduction.parameters import Ignore, listed
from hvdbridge.reduction.post_step import AfterStep
from hvdbridge.reduction.replicate import broadcast_optimizer, broadcast_tensors, shards_state
from hvdbridge.reduction.source import Options, closure_of, front_end, usual_bucket_mb, views_pay
from hvdbridge.reduction.wrapper import Wrapper, unwrapped
from hvdbridge.training import runtime, stopping
from hvdbridge.training.hook_state import Controls
from hvdbridge.training.sync_batchnorm import SyncBatchNorm

Optimizers = Optimizer | Sequence[Optimizer] | None


class GradientSynchronizer(Controls):
    """Aggregates a model's gradients over the ranks with one policy, on whatever backend runs.

    When ``backward()`` returns, ``p.grad`` holds the aggregated gradients on every rank. All ranks of the job
    construct it alike; names, shapes, dtypes and options are compared, then rank 0's parameters, buffers and
    optimizer state are copied to all.

    Args:
        model: any module with parameters that require gradients.
        optimizer: one, a list, or None; :attr:`optimizer` has the same structure.
        policy: a spec string, a :class:`~hvdbridge.Policy`, or None for what ``hb.init`` was given.
        bucket_mb: size of a gradient bucket in MiB; None: ``HVDBRIDGE_BUCKET_MB``, or the policy's
            (:func:`~hvdbridge.policies.dense.bucket_mb`: 25 as in DDP, or 10), and among several nodes
            not more than 10, or 5 where it is :attr:`bytewise <hvdbridge.Policy.bytewise>` (but where there is
            NCCL, with a static graph, or before torch 2.13). ``"auto"``: the best for this policy, model and network,
            by measurements of some seconds. Policies that are not dense may give other bits with another size: where
            runs must be equal, take the number of :attr:`bucket_mb`. Policies of the whole gradient
            (:attr:`Policy.scope <hvdbridge.Policy.scope>` ``"step"``) have one bucket, whatever it is.
        group: the ranks that aggregate together (iterable of ranks, or the backend's own group); None: all.
            Every rank of the job takes part in the construction, each with the group it belongs to.
        find_unused_parameters: a parameter that got no gradient on any rank keeps its old one. With False, a
            backward that makes no gradient for some parameter is an error.
        weighted: True: exchange :attr:`weight` in every step; False: never; None: the first step decides.
        static_graph, broadcast_buffers: as in DistributedDataParallel.
        gradient_as_bucket_view: as there: ``p.grad`` is a view of a bucket, without a copy, and what holds it over
            ``zero_grad()`` finds the next step's in it: give False then. None: where that is faster,
            :func:`~hvdbridge.reduction.source.views_pay`.
        seed: of the randomness that all ranks share.
        ignore: names, patterns of names (``"head.*"``), parameters or buffers that are left alone: they are neither
            copied from rank 0 nor compared nor aggregated, and need not have equal shapes. So are those that
            ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` was told.
        broadcast: what is copied from rank 0: ``"all"`` parameters and buffers, or without parameters that are frozen
            (``"trainable"``), which every rank has loaded alike.
        wrapper: for hvdbridge's own use.

    Attributes:
        model: what the backend's users know: a DistributedDataParallel on torch, else ``model`` itself.
        optimizer: on Horovod a real ``hvd.DistributedOptimizer``, else the optimizer itself.
        bucket_mb: the size of a gradient bucket in MiB.

    Raises:
        NotInitialized: ``hb.init()`` is missing.
        RankMismatch: ranks differ in model, policy or options.
        ConfigurationError: nothing to train, a policy that does not parse or is not defined for so few ranks, or a
            model that is torch's DistributedDataParallel already.
        Unsupported: the model makes sparse gradients, or has complex parameters.
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
        self._bare = model = unwrapped(model)
        self._left_alone = left_alone = parameters.ignored(model, ignore)
        self._params = params = parameters.trainable(model, left_alone)
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        tensors = {name: tensor for name, tensor in named if name not in left_alone}
        refuse_model(model, params, tensors)
        if broadcast not in ("all", "trainable"):
            raise ConfigurationError(f"broadcast={broadcast!r} must be 'all' or 'trainable'")
        bucket_mb = session.config.bucket_mb if bucket_mb is None else bucket_mb
        said = None if bucket_mb == "auto" else bucket_mb
        if said is not None and (isinstance(said, str) or not said > 0):
            raise ConfigurationError(f"bucket_mb={bucket_mb!r} must be a positive number of MiB, 'auto' or None")
        if bucket_mb == "auto":
            check_rehearses(self.policy)
        self._wrapper, self._replaced = wrapper is not None, False
        self._all: list[GradientSynchronizer] = session.opened.setdefault("synchronizers", [])
        replace_earlier(self._all, model, params)
        self._context = ReductionContext.among(session, group, device_of(params))
        options = Options(
            self._usual_mb(static_graph) if said is None else said,
            find_unused_parameters, static_graph, broadcast_buffers,
            views_pay(params.values()) if gradient_as_bucket_view is None else gradient_as_bucket_view,
            said=said is not None, whole=self.policy.scope == "step", ignored=tuple(left_alone),
            wrapper=wrapper,
        )  # fmt: skip
        optimizers = as_list(optimizer)
        given = {"policy": label(self.policy), "options": options, "weighted": weighted, "seed": seed}
        given |= {"bucket_mb": bucket_mb, "optimizers": len(optimizers), "broadcast": broadcast}
        self._context.agree(self.policy, describe(model, params, given, left_alone))
        self._share([t for t in tensors.values() if broadcast == "all" or not frozen(t)], optimizers)
        self._attach(optimizers, bucket_mb == "auto", options, seed, weighted)
        self.optimizer = like(optimizer, self._optimizers)

    def _usual_mb(self, static_graph: bool) -> float:
        channel = self._context.communicator
        return usual_bucket_mb(self.policy, channel.nodes, channel.capabilities.blocks_host, static_graph)

    def _share(self, tensors: list[Tensor], optimizers: list[Optimizer]) -> None:
        """Copy rank 0's parameters, buffers and optimizer state to all."""
        self._alone = [p for name, p in self._bare.named_parameters() if name in self._left_alone]
        self._context.scheduler.run(broadcast_tensors(tensors), self._context.communicator)
        for each in optimizers:
            broadcast_optimizer(each, self._context.control, left_alone=self._alone)

    def _attach(
        self, originals: list[Optimizer], measure: bool, options: Options, seed: int, weighted: bool | None
    ) -> None:
        """Make what aggregates, and put hooks on model and optimizers."""
        context, model, params = self._context, self._bare, self._params
        session, communicator = context.session, context.communicator
        if measure:
            options = replace(options, bucket_mb=fastest_bucket_mb(self.policy, params, context, options.bucket_mb))
        self.bucket_mb = options.bucket_mb
        self._settings = self._aggregator = Aggregator(self.policy, params, context, seed, weighted)
        make = front_end(registry.entry(session.backend).front_end)
        self._source = make(model, originals, params, self._aggregator, options)
        self.model, self._optimizers = self._source.model, self._source.optimizers
        self._known = set(map(id, [*params.values(), *self._alone]))
        self._source.started = self._settle
        self._after = AfterStep(self._aggregator, params, self._optimizers, self.model)
        pairs = zip(originals, self._optimizers, strict=True)
        self._hooks = [one.register_step_pre_hook(partial(refuse, one)) for one, other in pairs if one is not other]
        self._hooks += [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
        self._norms = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
        for norm in self._norms:
            norm.communicator = communicator.split([range(communicator.size)])
            norm.synchronizer = self
        self._key = str(next(session.opened.setdefault("keys", itertools.count())))
        self._closed = False
        self._all.append(self)
        session.at_shutdown(self.close)

    def check_in_use(self) -> None:
        """
        Raises:
            StepError: a forward that records gradients, although another wrapper has taken this one's place.
        """
        if self._replaced and torch.is_grad_enabled():
            raise StepError(
                f"rank {self._context.control.rank}: forward of a DistributedDataParallel whose module was wrapped "
                "again since. Use the last wrapper."
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards within accumulate locally; the next backward of one outside aggregates them. As in DDP
        the forward decides: a backward within, of a forward before, aggregates."""
        before = self._source.synchronizing
        self._source.synchronizing = False
        try:
            with getattr(self.model, "no_sync", nullcontext)():
                yield
        finally:
            self._source.synchronizing = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """For ranks with unequal numbers of steps: one that has left the block's loop shadows the others with
        weight 0 until all have; then every rank gets the model and optimizer state of one that finished last.

        All ranks enter together. One forward and one backward per step. Unset weights count as 1 here.

        Raises:
            Unsupported: the model has a SyncBatchNorm, whose statistics need a forward of every rank; or the state of
                an optimizer is sharded (ZeroRedundancyOptimizer).
        """
        if self._norms:
            raise Unsupported("join() with SyncBatchNorm: a rank without data makes no forward. Give it padding.")
        if any(map(shards_state, self._optimizers)):
            raise Unsupported(
                "join() with an optimizer whose state is sharded: a rank without data makes no step, and nobody else "
                "has its part. Give it padding."
            )
        aggregator = self._aggregator
        aggregator.joining = True
        before = self._source.steps
        try:
            with self._source.join():
                yield
            self._after.catch_up()
            self._aggregator.settle()
            steps = self._context.control.all_gather_object(self._source.steps - before)
            last = max(rank for rank, count in enumerate(steps) if count == max(steps))  # as DDP
            buffers = [buffer for name, buffer in self._bare.named_buffers() if name not in self._left_alone]
            flow = broadcast_tensors([*self._params.values(), *buffers], last)
            self._context.scheduler.run(flow, self._context.communicator)
            for each in self._optimizers:
                broadcast_optimizer(each, self._context.control, last, self._alone)
        finally:
            aggregator.joining = aggregator.joined = False

    @property
    def stop_requested(self) -> bool:
        """Whether this is the last step: True on all ranks after the same step once any rank got SIGTERM or SIGUSR1 or
        called :func:`hvdbridge.stop`, and from then on. Read it once per step, behind ``optimizer.step()``, on all
        ranks; then save, and leave the loop::

            if sync.stop_requested:
                save()
                break

        The first read installs the handlers of the signals (:func:`hvdbridge.stop_on_signals`). Where replicas drift it
        is True after the next average of all. A rank that is through within :meth:`join` answers for itself, and finds
        it True afterwards. Groups that train side by side stop at the same count of steps, since they may need each
        other. No collective is made; while a stop is under way a read may wait for a round trip.

        Raises:
            HvdbridgeError: the job fails meanwhile.
        """
        stopping.stop_on_signals()
        step = self._aggregator.step
        return self._monitor.over(self._key, step) and (step == 0 or averaged(self.policy, step - 1))

    def synchronize(self) -> None:
        """Wait for what is outstanding; on every backend backward has waited already, so this finds nothing.

        Raises:
            HvdbridgeError: the cause, if an aggregation failed.
        """
        self._context.scheduler.check_failure()

    def flush(self) -> bool:
        """Finish what a policy left for later; collective, and harmless where nothing is left. Call it at the end of
        training, and before collectives of your own where an optimizer's step may have been skipped on one rank.

        What was to be done to the parameters after the last step is done now (``local_sgd``, ``diloco``), if that step
        did not happen on this rank. The aggregate that ``delayed`` holds goes to ``p.grad``.

        Returns:
            Whether there is one: then ``p.grad`` holds it, for one more ``optimizer.step()`` (None for parameters of
            which nothing was held). An aggregate of nothing but zeros counts as none.

        Raises:
            HvdbridgeError: the cause, if an aggregation failed.
        """
        self.synchronize()
        self._after.catch_up()
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
            self._after.catch_up()
        return super().state_dict(gather)

    def load_state_dict(self, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
        super().load_state_dict(saved, on_resize)
        self._after.forget()

    def close(self) -> None:
        """Take the hooks off and free the communicators. The model stays as it is, its gradients stay local, and a
        synchronizer may be constructed anew: for :attr:`model` and :attr:`optimizer`, or for what they were made of.
        Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._settle()
        for hook in self._hooks:
            hook.remove()
        self._after.remove()
        self._all.remove(self)
        self._source.remove()
        for norm in self._norms:
            if norm.communicator is not None and self._context.scheduler.failure is None:
                norm.communicator.close()
            norm.communicator = norm.synchronizer = None
        self._context.session.forget_at_shutdown(self.close)
        self._context.close()

    def _settle(self) -> None:
        """The first step is over: from now on a wait may take as long as in any step."""
        self._monitor.starting = False

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = closure_of(args, kwargs)
        if closure is None:
            self._check_step(optimizer)
            return None
        self._after.before_closure()
        if getattr(closure, "checks_step", None) is self:  # Horovod's own step() calls this hook twice
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
        self._after.adopt()
        where = f"rank {self._context.control.rank}: optimizer.step()"
        if self._source.steps == 0:
            raise StepError(f"{where} before any synchronizing backward(): there are no aggregated gradients.")
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if held and not any(id(p) in self._known for p in held):
            raise StepError(
                f"{where} of an optimizer that holds none of the model's parameters: {listed(self._names_of(held))}. "
                "Construct it over model.parameters(), after what replaces these."
            )
        strange = [p for p in held if id(p) not in self._known and p.grad is not None]
        if strange:
            raise StepError(
                f"{where} with gradients of {len(strange)} parameters that nobody aggregates: "
                f"{listed(self._names_of(strange))}: unfrozen or added since, or not the model's. Construct the "
                "synchronizer anew, with a model that holds them; each synchronizer needs an optimizer of its own."
            )
        if self._source.touched:
            self._source.check_strays("optimizer.step()")
        if self.skipped:
            for parameter in held:
                parameter.grad = None

    def _names_of(self, tensors: Sequence[Tensor]) -> list[str]:
        names = {p: name for name, p in self.model.named_parameters()} | self._source.names
        return [names.get(p, f"of shape {list(p.shape)}, not in the model") for p in tensors]


def replace_earlier(opened: list[GradientSynchronizer], model: Module, params: Mapping[str, Tensor]) -> None:
    """Close the synchronizer of an earlier wrapper around ``model``, the same on all ranks: two would aggregate.

    Raises:
        StepError: a synchronizer that no wrapper made aggregates the model, a part of it, or what it is a part of. A
            forward of one would be a forward of the other on the backends whose hooks are on the module.
    """
    modules = set(model.modules())
    for each in opened:
        if not each._wrapper and (each._bare in modules or model in set(each._bare.modules())):
            theirs = set(each._params.values())
            raise StepError(
                f"{listed(name for name, p in params.items() if p in theirs)}: a GradientSynchronizer aggregates them "
                "already. Use it, or close() it first."
            )
    for each in [each for each in opened if each._bare is model]:
        each.close()
        each._replaced = True


def device_of(params: Mapping[str, torch.Tensor]) -> torch.device:
    """The device of the scheduler: a GPU, if any of ``params`` is on one."""
    devices = [p.device for p in params.values()]
    return next((device for device in devices if device.type == "cuda"), devices[0])


def refuse(replaced: Optimizer, optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Step pre-hook of an optimizer that was wrapped, and of its wrapper, which shares the hooks."""
    if optimizer is replaced:
        raise StepError("step() of the optimizer that was wrapped. Use sync.optimizer: its gradients are aggregated.")


def refuse_model(model: Module, params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """
    Args:
        params: what is to be aggregated.
        tensors: the parameters and buffers that are to be synchronized.

    Raises:
        ConfigurationError: a DistributedDataParallel of torch's own is in the model.
        Unsupported: tensors are sharded or without values, some of ``params`` have optimizers that step within
            backward, or backwards are compiled.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and not isinstance(module, Wrapper):
            raise ConfigurationError(
                f"{name or 'the model'} is a DistributedDataParallel of torch's, which averages gradients by itself. "
                "Give the bare module: ddp.module."
            )
    refuse_compiled_autograd()
    parameters.refuse_untouchable(tensors)
    if held := [name for name, p in params.items() if hasattr(p, "_in_backward_optimizers")]:
        raise Unsupported(
            f"{listed(held)}: _apply_optimizer_in_backward makes optimizers step by gradients of this rank alone, "
            "before they are aggregated. Let one optimizer step after backward()."
        )


def frozen(tensor: Tensor) -> bool:
    """Whether it is a parameter that is not trained."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def as_list(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def like(optimizer: Optimizers, wrapped: list[Optimizer]) -> Any:
    """``wrapped`` in the structure that the user gave."""
    if optimizer is None:
        return None
    return wrapped[0] if isinstance(optimizer, Optimizer) else type(optimizer)(wrapped)  # type: ignore[call-arg]
