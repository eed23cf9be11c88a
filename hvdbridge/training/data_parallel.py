"""DistributedDataParallel's own signature on every backend.

Rules:

1. Under torch it is a DistributedDataParallel. Elsewhere it is a module around the user's, and our reducer aggregates
   the gradients. A :class:`~hvdbridge.training.synchronizer.GradientSynchronizer` without an optimizer makes both.
2. ``state_dict()`` has the bare module's keys, also as a part of another module's.
3. An option of DDP either has the same effect here, or is refused.
4. A copy (``copy.deepcopy``, ``AveragedModel``, ``torch.save``) is of the module alone: to evaluate, not to train.
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
from hvdbridge.reduction.ddp import JOIN, TORCHS
from hvdbridge.reduction.ddp import DistributedDataParallel as TorchDDP
from hvdbridge.reduction.parameters import Ignore
from hvdbridge.reduction.wrapper import Wrapper
from hvdbridge.training import runtime
from hvdbridge.training.foreign_hook import from_comm_hook
from hvdbridge.training.synchronizer import GradientSynchronizer

REFUSED = {
    "bucket_cap_mb_list": "Give one size for all buckets, bucket_cap_mb.",
    "delay_all_reduce_named_params": "Leave it out: all gradients are aggregated when backward() returns.",
    "mixed_precision": "Run the forward under torch.autocast; with policy='bf16' gradients travel in 16 bits.",
    "param_to_hook_all_reduce": "Leave it out: all gradients are aggregated when backward() returns.",
    "skip_all_reduce_unused_params": "Freeze unused parameters by requires_grad_(False) before they are wrapped.",
}
"""torch's options of which only None and False are taken, and what to do instead."""


class DistributedDataParallel(Module):
    """``model = hb.DistributedDataParallel(model)``: gradients are aggregated when ``backward()`` returns.

    All ranks of the job construct it alike. Rank 0's parameters and buffers are copied to all.

    Args:
        module: the module to train.
        device_ids, output_device: None, or the one device that the module is on already.
        dim: 0.
        broadcast_buffers, forward_sync_buffers: as in torch's; the second, where given, counts. Both None: True.
        find_unused_parameters, static_graph: as in torch's.
        init_sync: must be True.
        process_group: the ranks that aggregate together (iterable of ranks, a process group of torch, or the backend's
            own group); None: all.
        device_mesh: the same as a DeviceMesh of one dimension.
        bucket_cap_mb: size of a bucket in MiB; None: ``HVDBRIDGE_BUCKET_MB``, or as in
            ``GradientSynchronizer``: among several nodes not DDP's 25, so that with three ranks and more sums differ
            from DDP's by rounding.
        check_reduction, batched_grad_copy: without effect, as in torch's; and because copies are made all at once.
        gradient_as_bucket_view: as in torch's; None: where that is faster, as for ``GradientSynchronizer``.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision,
            skip_all_reduce_unused_params, bucket_cap_mb_list: None or False; another value is refused.
        policy: a spec string, a policy, or None for what ``hb.init`` was given.
        weighted: as for ``GradientSynchronizer``; the weights are set by :attr:`weight`.
        ignore, broadcast: as for ``GradientSynchronizer``.

    Attributes:
        module: the user's module.
        synchronizer: what aggregates: its ``stats()``, ``state_dict()`` (the policy's state), ``close()``.

    Raises:
        NotInitialized: ``hb.init()`` is missing.
        RankMismatch: ranks differ in model, policy or options.
        Unsupported: an option that has no meaning here.

    A second wrapper around a module takes the place of the first, which refuses to be trained from then on.
    """

    synchronizer: GradientSynchronizer
    takes_plain_keys = True

    def __new__(cls: Any, *args: Any, **options: Any) -> Any:
        if issubclass(cls, Wrapper):
            return super().__new__(cls)
        kind = _OnTorch if runtime.current().backend == "torch" else _Elsewhere
        return super().__new__(kind if cls is DistributedDataParallel else _subclass(cls, kind))

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
        for name, remedy in REFUSED.items():
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
        """This rank's weight of the next step; see ``GradientSynchronizer.weight``."""
        return self.synchronizer.weight

    @weight.setter
    def weight(self, value: float | None) -> None:
        self.synchronizer.weight = value

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Module, params_and_buffers_to_ignore: Any) -> None:
        """As torch's, for a wrapper that is made later; see ``ignore``."""
        TORCHS._set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore)

    def _set_static_graph(self) -> None:
        """As torch's, which scripts call for want of ``static_graph=True``; before the first step.

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
        """Refused: ``Join([...])`` of torch; see :meth:`join`.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(JOIN)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Aggregate by a communication hook of DDP's, on whatever backend; before the first backward, on every rank.

        Raises:
            Unsupported: see :func:`~hvdbridge.training.foreign_hook.from_comm_hook`; or the policy is no plain mean.
            StepError: a step has been made.
        """
        synchronizer = self.synchronizer
        if label(synchronizer.policy) != "mean":
            raise Unsupported(
                f"register_comm_hook beside policy={label(synchronizer.policy)!r}: a hook takes the place of a policy. "
                "Give one of the two."
            )
        chosen = from_comm_hook(state, hook)
        synchronizer._aggregator.use(chosen, synchronizer._params)
        synchronizer.policy = chosen

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Refused: see :meth:`register_comm_hook`, and the policies ``mean`` and ``fp16``.

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
        """For ranks with unequal numbers of steps; see ``GradientSynchronizer.join``.

        Args:
            divide_by_initial_world_size: a rank that is through counts as zeros; False: it does not count.
            enable: False: do nothing.
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


class _OnTorch(DistributedDataParallel, TorchDDP):
    """A DistributedDataParallel of torch; nothing here shadows its own."""

    join: Any = DistributedDataParallel.join

    def _set_static_graph(self) -> None:
        """As torch's, which calls it itself while it is constructed."""
        if "synchronizer" in self.__dict__:
            super()._set_static_graph()
            logged: Any = self._get_ddp_logging_data
            source: Any = self.synchronizer._source
            source.unmarked = len(logged()["bucket_sizes"].split(","))
            self.find_unused_parameters = False  # the reducer finds them now, and join() goes by this
        TORCHS._set_static_graph(self)

    join_hook: Any = TorchDDP.join_hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """torch's DistributedDataParallel's."""
        self.synchronizer.check_in_use()
        return super().forward(*args, **kwargs)


class _Elsewhere(Wrapper, DistributedDataParallel):
    """A module around the user's."""

    def adopt(self, module: Module) -> None:
        """Called by the synchronizer: ``module`` is what it aggregates."""
        Module.__init__(self)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module's."""
        self.synchronizer.check_in_use()
        if self.closed:
            return self.module(*args, **kwargs)
        self.synchronizer._source.before_forward()
        output = self.module(*args, **kwargs)
        self.synchronizer._source.after_forward(output)
        return output

    @property
    def closed(self) -> bool:
        """Whether its gradients stay local."""
        return "synchronizer" not in self.__dict__ or self.synchronizer._closed

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of the next forward aggregates; ``no_sync()`` sets it."""
        return self.synchronizer._source.synchronizing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.synchronizer._source.synchronizing = value

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of forwards within accumulate locally; the next backward of one outside aggregates them."""
        return self.synchronizer.no_sync()


class _Copy(_Elsewhere):
    """A copy, or what was saved. Its gradients would not be aggregated, so it makes none."""

    def __init__(self, module: Module) -> None:
        self.adopt(module)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's.

        Raises:
            StepError: it would be trained.
        """
        if self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise StepError(
                "forward of a copy of a DistributedDataParallel, whose gradients nobody aggregates. To train it: "
                "hb.DistributedDataParallel(copy.module), on every rank; to evaluate: copy.eval(), or torch.no_grad()."
            )
        return self.module(*args, **kwargs)


@functools.cache
def _subclass(cls: Any, kind: Any) -> Any:
    """The user's subclass ``cls`` on a backend."""
    return type(cls.__name__, (cls, kind), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def check_devices(module: Module, device_ids: list[Any] | None, output_device: Any) -> None:
    """
    Raises:
        Unsupported: several devices, or others than the module's.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise Unsupported(f"device_ids={device_ids}: one process drives one device. Start a process for each.")
    found = {p.device for p in module.parameters()}
    for what, wanted in (("device_ids", (device_ids or [None])[0]), ("output_device", output_device)):
        if wanted is None:
            continue
        device = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)
        if found and found != {device}:
            raise Unsupported(
                f"{what} says {device}, and the module is on {', '.join(sorted(map(str, found)))}. Move it there "
                f"first, or leave {what} out."
            )
