"""DistributedDataParallel: torch's signature, on every backend.

Rules:

1. On torch the model is a torch.nn.parallel.DistributedDataParallel. On other backends it is a module around the
   user's, and our reducer aggregates the gradients. Both have a
   :class:`~hvdbridge.training.synchronizer.GradientSynchronizer` without an optimizer.
2. ``state_dict()`` has the bare module's keys, also within the state of another module.
3. An option of DDP has the same effect here, or raises an error.
4. A copy (``copy.deepcopy``, ``AveragedModel``, ``torch.save``) contains only the module. It can evaluate, not train.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.nn import Module

from hvdbridge.errors import StepError, Unsupported
from hvdbridge.policies import label
from hvdbridge.policy.base import Policy
from hvdbridge.reduction.ddp import JOIN_MESSAGE, TORCH_DDP
from hvdbridge.reduction.ddp import DistributedDataParallel as SynchronizedDDP
from hvdbridge.reduction.parameters import Ignore
from hvdbridge.reduction.wrapper import Wrapper
from hvdbridge.training import runtime
from hvdbridge.training.foreign_hook import from_comm_hook
from hvdbridge.training.synchronizer import GradientSynchronizer

UNSUPPORTED_OPTIONS = {
    "bucket_cap_mb_list": "Give one size for all buckets, bucket_cap_mb.",
    "delay_all_reduce_named_params": "Leave it out: all gradients are aggregated when backward() returns.",
    "mixed_precision": "Run the forward under torch.autocast; with policy='bf16' gradients travel in 16 bits.",
    "param_to_hook_all_reduce": "Leave it out: all gradients are aggregated when backward() returns.",
    "skip_all_reduce_unused_params": "Freeze unused parameters by requires_grad_(False) before they are wrapped.",
}
"""Options of torch for which only None and False are allowed, and what to do instead."""


class DistributedDataParallel(Module):
    """Module that aggregates its gradients over the ranks when ``backward()`` returns.

    Use it as ``model = hb.DistributedDataParallel(model)``. All ranks of the job pass the same arguments. Rank 0's
    parameters and buffers are copied to all ranks. A second wrapper around a module replaces the first. From then on a
    forward of the first raises an error, unless gradients are disabled.

    Args:
        module: the module to train.
        device_ids, output_device: None, or the one device that the module is on.
        dim: must be 0.
        broadcast_buffers, forward_sync_buffers: as in torch. The second one wins if both are given. Both None: True.
        find_unused_parameters, static_graph: as in torch.
        init_sync: must be True.
        process_group: the ranks that aggregate together: an iterable of ranks, a process group of torch, the backend's
            own group, or None for all ranks.
        device_mesh: the same as a one-dimensional DeviceMesh.
        bucket_cap_mb: size of a bucket in MiB. None: ``HVDBRIDGE_BUCKET_MB``, or the default of
            ``GradientSynchronizer``. Among several nodes it is not DDP's 25, so that sums over three or more ranks
            differ from DDP's by rounding.
        check_reduction, batched_grad_copy: no effect. torch ignores the first too, and copies are always batched.
        gradient_as_bucket_view: as in torch. None: the faster way, as for ``GradientSynchronizer``.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision: must be None.
        skip_all_reduce_unused_params, bucket_cap_mb_list: must be None or False.
        policy: a spec string, a policy, or None for the policy given to ``hb.init``.
        weighted: as for ``GradientSynchronizer``; set the weights by :attr:`weight`.
        ignore, broadcast: as for ``GradientSynchronizer``.

    Attributes:
        module: the user's module.
        synchronizer: the ``GradientSynchronizer``, for ``stats()``, ``state_dict()`` (the policy's state) and
            ``close()``.

    Raises:
        NotInitialized: ``hb.init()`` was not called.
        ConfigurationError: an argument is invalid, or the module has no trainable parameter.
        RankMismatch: ranks differ in model, policy or options.
        StepError: a ``GradientSynchronizer`` aggregates this module, a part of it, or a module that contains it.
        Unsupported: an option is not supported.
    """

    synchronizer: GradientSynchronizer
    takes_plain_keys = True

    def __new__(cls: Any, *args: Any, **options: Any) -> Any:
        if issubclass(cls, Wrapper):
            return super().__new__(cls)
        backend_class = _OnTorch if runtime.current().backend == "torch" else _ModuleWrapper
        return super().__new__(backend_class if cls is DistributedDataParallel else _subclass(cls, backend_class))

    def __init__(
        self,
        module: Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        policy: str | Policy | None = None,
        weighted: bool | None = None,
        ignore: Ignore = None,
        broadcast: Literal["all", "trainable"] = "all",
    ) -> None:
        arguments = locals()
        if not isinstance(module, Module):
            raise Unsupported(f"DistributedDataParallel wraps a module, got {type(module).__name__}")
        if dim != 0 or not init_sync:
            raise Unsupported(
                f"DistributedDataParallel(dim={dim}, init_sync={init_sync}): only dim=0 and init_sync=True"
            )
        check_devices(module, device_ids, output_device)
        for name, remedy in UNSUPPORTED_OPTIONS.items():
            if arguments[name] is not None and arguments[name] is not False:
                raise Unsupported(f"DistributedDataParallel({name}=...) has no meaning here. {remedy}")
        if device_mesh is not None and process_group is not None:
            raise Unsupported("DistributedDataParallel(process_group=..., device_mesh=...): give one of the two")
        buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.__dict__["synchronizer"] = GradientSynchronizer(
            module, None, policy, bucket_cap_mb, process_group if device_mesh is None else device_mesh,
            find_unused_parameters, weighted, static_graph, buffers is None or buffers, gradient_as_bucket_view,
            ignore=ignore, broadcast=broadcast, wrapper=self,
        )  # fmt: skip
        self.__dict__["device_mesh"] = device_mesh

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Copy, (self.module,)

    @property
    def weight(self) -> float | None:
        """This rank's weight in the next step; see ``GradientSynchronizer.weight``."""
        return self.synchronizer.weight

    @weight.setter
    def weight(self, value: float | None) -> None:
        self.synchronizer.weight = value

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Module, params_and_buffers_to_ignore: Any) -> None:
        """Set the names to ignore for a wrapper that is constructed later, as in torch; see ``ignore``."""
        TORCH_DDP._set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore)

    def _set_static_graph(self) -> None:
        """Declare the graph static, as in torch. Scripts that lack ``static_graph=True`` call it before the first step.

        Raises:
            StepError: a step has been made.
        """
        source = self.synchronizer._source
        if source.steps or source.running:
            raise StepError(
                "_set_static_graph() should be called before training loop starts, and a step has been made. Give "
                "static_graph=True."
            )
        source.static_graph, source.find_unused = True, False

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuse torch's ``Join([...])``; see :meth:`join`.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(JOIN_MESSAGE)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Aggregate with a communication hook of DDP on any backend. Call it before the first backward, on every rank.

        Args:
            state, hook: as in :func:`~hvdbridge.training.foreign_hook.from_comm_hook`.

        Raises:
            Unsupported: see :func:`~hvdbridge.training.foreign_hook.from_comm_hook`; or the policy is not ``mean``.
            StepError: a step has been made.
        """
        synchronizer = self.synchronizer
        if label(synchronizer.policy) != "mean":
            raise Unsupported(
                f"register_comm_hook beside policy={label(synchronizer.policy)!r}: a hook takes the place of a policy. "
                "Give one of the two."
            )
        hook_policy = from_comm_hook(state, hook)
        synchronizer._aggregator.use(hook_policy, synchronizer._params)
        synchronizer.policy = hook_policy

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Refuse builtin hooks; the policies ``mean`` and ``fp16`` do the same.

        Raises:
            Unsupported: always.
        """
        raise Unsupported("_register_builtin_comm_hook: give policy='mean' or policy='fp16', which do the same.")

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train with unequal numbers of steps per rank; see ``GradientSynchronizer.join``.

        Args:
            divide_by_initial_world_size: True: a rank without data contributes zeros. False: it has weight 0.
            enable: False: this method has no effect.
            throw_on_early_termination: must be False.

        Raises:
            Unsupported: ``throw_on_early_termination=True``, or the model has a SyncBatchNorm.
        """
        if throw_on_early_termination:
            raise Unsupported("join(throw_on_early_termination=True): ranks cannot be interrupted here. Leave it out.")
        aggregator = self.synchronizer._aggregator
        aggregator.joined_weight = 1.0 if divide_by_initial_world_size else 0.0
        try:
            with self.synchronizer.join() if enable else nullcontext():
                yield
        finally:
            aggregator.joined_weight = 0.0


class _OnTorch(DistributedDataParallel, SynchronizedDDP):
    """The wrapper on torch, a DistributedDataParallel of torch; no method here hides one of torch's."""

    join: Any = DistributedDataParallel.join

    def _set_static_graph(self) -> None:
        """Declare the graph static; torch's constructor calls this, too."""
        if "synchronizer" in self.__dict__:
            super()._set_static_graph()
            get_data: Any = self._get_ddp_logging_data
            source: Any = self.synchronizer._source
            source.unmarked_buckets = len(get_data()["bucket_sizes"].split(","))
            self.find_unused_parameters = False  # the reducer now detects them itself, and torch's join() reads this
        TORCH_DDP._set_static_graph(self)

    join_hook: Any = SynchronizedDDP.join_hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run torch's forward."""
        self.synchronizer.check_in_use()
        return super().forward(*args, **kwargs)


class _ModuleWrapper(Wrapper, DistributedDataParallel):
    """The wrapper on other backends, a module around the user's."""

    def init_wrapper(self, module: Module) -> None:
        """Initialize this wrapper around ``module``; the synchronizer's source calls it."""
        Module.__init__(self)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's module, and notify the source before and after."""
        self.synchronizer.check_in_use()
        if self.closed:
            return self.module(*args, **kwargs)
        self.synchronizer._source.before_forward()
        output = self.module(*args, **kwargs)
        self.synchronizer._source.after_forward(output)
        return output

    @property
    def closed(self) -> bool:
        """True if gradients stay local."""
        return "synchronizer" not in self.__dict__ or self.synchronizer._closed

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the backward of the next forward aggregates; ``no_sync()`` sets it to False."""
        return self.synchronizer._source.synchronizing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.synchronizer._source.synchronizing = value

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally; see ``GradientSynchronizer.no_sync``."""
        return self.synchronizer.no_sync()


class _Copy(_ModuleWrapper):
    """A deep copy or a saved wrapper. No synchronizer aggregates its gradients, so it refuses to train."""

    def __init__(self, module: Module) -> None:
        self.init_wrapper(module)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            StepError: the forward would record gradients in training mode.
        """
        if self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise StepError(
                "forward of a copy of a DistributedDataParallel, whose gradients no synchronizer aggregates. To train "
                "it: hb.DistributedDataParallel(copy.module), on every rank; to evaluate: copy.eval(), or no_grad()."
            )
        return self.module(*args, **kwargs)


@functools.cache
def _subclass(cls: Any, backend_class: Any) -> Any:
    """Return the user's subclass ``cls`` with the base class of the backend."""
    return type(cls.__name__, (cls, backend_class), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def check_devices(module: Module, device_ids: list[Any] | None, output_device: Any) -> None:
    """Check the device options.

    Raises:
        Unsupported: they name several devices, or another one than the module's.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise Unsupported(f"device_ids={device_ids}: one process drives one device. Start a process for each.")
    devices = {p.device for p in module.parameters()}
    for option, given in (("device_ids", (device_ids or [None])[0]), ("output_device", output_device)):
        if given is None:
            continue
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
        if devices and devices != {device}:
            raise Unsupported(
                f"{option} says {device}, and the module is on {', '.join(sorted(map(str, devices)))}. Move it there "
                f"first, or leave {option} out."
            )
