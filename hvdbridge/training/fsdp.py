"""A policy between the replicas of a model that FSDP2 shards: what the all-reduce of native HSDP does.

Rules:

1. FSDP averages a group's gradients over the shards (reduce-scatter), calls the hook with this rank's part of the
   result, and goes on with what it finds there when the hook returns. So each hook waits for its group (on NCCL, by the
   stream alone). The order is that of FSDP's backward, the same on all ranks.
2. That part is the concatenation of the parameters in FSDP's own list of the group. Rows (or what else is sharded) are
   evenly cut, and the last ranks padded with zeros, so every rank has equal shapes. Each call of the hook compares the
   length.
3. A step is a backward. State is kept by parameter name and is that of this rank's shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module, Parameter

from hvdbridge.errors import ConfigurationError, StepError, Unsupported
from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Policy
from hvdbridge.policy.bucket import Layout
from hvdbridge.policy.collectives import used_here
from hvdbridge.reduction.aggregator import Piece
from hvdbridge.reduction.autograd import at_end_of_backward
from hvdbridge.reduction.parameters import trainable
from hvdbridge.training import runtime
from hvdbridge.training.hook_state import HookState, join_torch


class AllReduceHookState(HookState):
    """What :func:`set_all_reduce_hook` gives; see :class:`~hvdbridge.training.hook_state.HookState`.

    :attr:`weight` is one of a replica: the same on all its shards. ``state_dict()`` is of this rank's shard, with
    ``gather=True`` of this shard in all replicas; save one per shard.
    """

    def __init__(self, model: Module, policy: Policy, group: Any, weighted: bool | None, seed: int) -> None:
        super().__init__(policy, weighted, seed)
        if policy.scope == "step":
            raise Unsupported(
                f"{label(policy)} looks at all gradients at once, but FSDP wants each group's before it computes the "
                "next. Use a policy of scope 'bucket'."
            )
        params = trainable(model)
        shapes = {name: shard_shape(name, p) for name, p in params.items()}
        names = {p: name for name, p in params.items()}
        # fully_shard([a, b]) makes one group, with one state, of several modules
        groups: dict[Any, FSDPModule] = {
            fully_shard.state(module): module  # type: ignore[attr-defined]
            for module in model.modules() if isinstance(module, FSDPModule)
        }  # fmt: skip
        self._layouts = [
            Layout({names[p]: shapes[names[p]] for p in parameters_of(state) if p in names}) for state in groups
        ]
        if strange := params.keys() - {name for layout in self._layouts for name in layout.names}:
            raise Unsupported(f"no FSDPModule in this model shards {', '.join(sorted(strange))}: nobody aggregates it")
        join_torch()
        if (dist.get_rank(), dist.get_world_size()) != (runtime.rank(), runtime.size()):
            raise ConfigurationError(
                f"rank {runtime.rank()} of {runtime.size()} is {dist.get_rank()} of {dist.get_world_size()} in "
                "torch.distributed: start both with the same ranks"
            )
        meshes = [p.device_mesh for p in params.values() if isinstance(p, DTensor)]
        kind = meshes[0].device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        # Of a gradient's shape and type, and without memory: parameters may be on another device, or on none yet.
        like = {n: torch.zeros((), dtype=p.dtype, device=device).expand(shapes[n]) for n, p in params.items()}
        shards = sorted({f"{mesh.get_local_rank()} of {mesh.size()}" for mesh in meshes})
        if isinstance(group, dist.ProcessGroup):  # hvdbridge may run on another backend
            group = dist.get_process_group_ranks(group)
        self._open(like, group, device, {"shard": " and ".join(shards)})
        self._backward = -1
        self._left: set[int] = set()
        for index, module in enumerate(groups.values()):
            module.set_all_reduce_hook(partial(self._reduce, index))

    def _reduce(self, index: int, output: Tensor) -> None:
        """The hook of group ``index``: ``output`` (flat) becomes what the policy makes of all replicas' outputs."""
        aggregator, layout = self._opened(), self._layouts[index]
        if aggregator.scheduler.failure is not None:
            raise aggregator.scheduler.failure
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            if self._backward != -1:
                raise StepError(
                    f"rank {runtime.rank()}: the backward before this one was left by an exception when some "
                    "gradients had been aggregated. Other ranks wait for the rest: end the job."
                )
            at_end_of_backward(self._finish)
            self._backward, self._left = backward, {i for i, each in enumerate(self._layouts) if each.numel}
            aggregator.begin()
        if output.numel() != layout.numel:
            raise Unsupported(
                f"rank {runtime.rank()}: FSDP gives {output.numel()} elements for {layout.numel} of {layout.names}: "
                "some have no gradient, or were frozen or unfrozen since. Call set_reduce_scatter_unused_params(True) "
                "on the model, or set_all_reduce_hook anew."
            )
        used_here(output)  # of another stream, where FSDP may free it as soon as the hook has returned
        self._left.discard(index)

        def deliver(update: Tensor | None) -> None:
            if update is not None:
                used_here(output)
                output.copy_(update)

        aggregator.submit(Piece(layout, output, deliver), last=not self._left)
        aggregator.wait()

    def _finish(self) -> None:
        self._backward = -1
        self._opened().end()


def shard_shape(name: str, parameter: Tensor) -> torch.Size:
    """The shape that each rank's part of a parameter has in the output of the reduce-scatter: that of the largest.

    Raises:
        Unsupported: it is not sharded over one dimension.
    """
    if not isinstance(parameter, DTensor):
        raise Unsupported(
            f"{name} is not sharded by FSDP. Call fully_shard first; reshard() if a forward has left the model whole; "
            "an ignored parameter would be aggregated by nobody."
        )
    mesh, placement = parameter.device_mesh, parameter.placements[0]
    if mesh.ndim > 1 or not isinstance(placement, Shard):
        raise Unsupported(
            f"{name} is on a mesh of {mesh.ndim} dimensions as {parameter.placements}. Give fully_shard the one "
            "dimension of shards (in native HSDP the replicas have been averaged before a hook is called), and "
            "set_all_reduce_hook that of replicas. Tensor parallelism is not supported."
        )
    shape = list(parameter.shape)
    shape[placement.dim] = -(-shape[placement.dim] // mesh.size())
    return torch.Size(shape)


def parameters_of(state: Any) -> list[Parameter]:
    """The parameters of a group of FSDP's, in the order of its reduce-scatter."""
    group = state._fsdp_param_group
    held = [] if group is None else [parameter._module_info for parameter in group.fsdp_params]
    return [getattr(info.module, info.param_name) for info in held]


def set_all_reduce_hook(
    model: Module, policy: str | Policy, group: Any, weighted: bool | None = None, seed: int = 0
) -> AllReduceHookState:
    """Aggregate the gradients of a model sharded by ``fully_shard`` over its replicas with a policy.

    ``mean`` does what native HSDP does. It calls ``FSDPModule.set_all_reduce_hook`` of every FSDPModule in ``model``;
    hvdbridge need not be initialized, and if it is, on any backend. Collective over all ranks of the job. As in HSDP,
    replicas begin with equal parameters by the user's care (the same seed, or the same checkpoint).

    A policy sees each parameter as this rank's shard of it: ``[ceil(rows / shards), ...]``, zeros where rows are
    missing on the last shards. What it decides per parameter (largest elements, a scale, low rank) is per shard.

    To accumulate gradients use ``set_requires_gradient_sync(False)``; after ``set_requires_all_reduce(False)`` FSDP
    calls hooks all the same, and every backward is aggregated.

    Args:
        model: after ``fully_shard(..., mesh=)`` with a mesh of one dimension, that of the shards.
        policy: a spec string or a policy, of scope "bucket".
        group: the ranks that hold the same shard as this one: the mesh dimension of replicas, its process group, or an
            iterable of ranks.
        weighted: True: exchange ``state.weight`` in every step; False: never; None: the first step decides.
        seed: of the randomness that the replicas share.

    Raises:
        SpecError: the policy does not parse.
        Unsupported: native HSDP, tensor parallelism, parameters that FSDP does not shard; a policy of scope "step".
        ConfigurationError: the policy acts after the optimizer's step, or is not defined for so few ranks.
        RankMismatch: the ranks of ``group`` differ in shard, model or policy.

    Source of the hook: ``torch.distributed.fsdp.FSDPModule.set_all_reduce_hook``.
    """
    return AllReduceHookState(model, from_spec(policy), group, weighted, seed)
