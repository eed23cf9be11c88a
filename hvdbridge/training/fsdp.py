"""Aggregate gradients over the replicas of a model sharded by FSDP2, in place of the all-reduce of native HSDP.

Rules:

1. FSDP averages a group's gradients over the shards (reduce-scatter), calls the hook with this rank's shard of the
   result, and uses its content after the hook returns. So each hook call waits for the group's update (on NCCL, the
   stream waits, not the host). The order of calls is that of FSDP's backward, the same on all ranks.
2. The shard is the concatenation of the group's parameters, in the order of FSDP's own list. The sharded dimension is
   cut evenly and padded with zeros on the last ranks, so shapes are equal on all ranks. Each hook call checks the
   length.
3. A step is one backward. State is stored by parameter name, and belongs to this rank's shard.
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
from hvdbridge.reduction.aggregator import SourceBucket
from hvdbridge.reduction.autograd import at_end_of_backward
from hvdbridge.reduction.parameters import trainable
from hvdbridge.training import runtime
from hvdbridge.training.hook_state import HookState, join_torch


class AllReduceHookState(HookState):
    """The state that :func:`set_all_reduce_hook` returns; see :class:`~hvdbridge.training.hook_state.HookState`.

    :attr:`weight` belongs to a replica: set the same value on all its shards. ``state_dict()`` returns the state of
    this rank's shard, with ``gather=True`` of this shard in all replicas; save one per shard.
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
        # fully_shard([a, b]) makes one group of several modules, which share one state
        groups: dict[Any, FSDPModule] = {
            fully_shard.state(module): module  # type: ignore[attr-defined]
            for module in model.modules() if isinstance(module, FSDPModule)
        }  # fmt: skip
        self._layouts = [
            Layout({names[p]: shapes[names[p]] for p in parameters_of(state) if p in names}) for state in groups
        ]
        if missing := params.keys() - {name for layout in self._layouts for name in layout.names}:
            raise Unsupported(f"no FSDPModule in this model shards {', '.join(sorted(missing))}: no hook aggregates it")
        join_torch()
        if (dist.get_rank(), dist.get_world_size()) != (runtime.rank(), runtime.size()):
            raise ConfigurationError(
                f"rank {runtime.rank()} of {runtime.size()} is {dist.get_rank()} of {dist.get_world_size()} in "
                "torch.distributed: start both with the same ranks"
            )
        meshes = [p.device_mesh for p in params.values() if isinstance(p, DTensor)]
        kind = meshes[0].device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        # With a gradient's shape and dtype, from one element: parameters may be on another device, or still on meta.
        shards_like = {n: torch.zeros((), dtype=p.dtype, device=device).expand(shapes[n]) for n, p in params.items()}
        shards = sorted({f"{mesh.get_local_rank()} of {mesh.size()}" for mesh in meshes})
        if isinstance(group, dist.ProcessGroup):  # hvdbridge may run on another backend
            group = dist.get_process_group_ranks(group)
        self._create_aggregator(shards_like, group, device, {"shard": " and ".join(shards)})
        self._backward_id = -1
        self._pending: set[int] = set()
        for index, module in enumerate(groups.values()):
            module.set_all_reduce_hook(partial(self._reduce, index))

    def _reduce(self, index: int, output: Tensor) -> None:
        """The hook of group ``index``: replace ``output`` (flat) by the policy's update from all replicas' outputs."""
        aggregator, layout = self._require_aggregator(), self._layouts[index]
        if aggregator.scheduler.failure is not None:
            raise aggregator.scheduler.failure
        backward = torch._C._current_graph_task_id()
        if backward != self._backward_id:
            if self._backward_id != -1:
                raise StepError(
                    f"rank {runtime.rank()}: the backward before this one was left by an exception when some "
                    "gradients had been aggregated. Other ranks wait for the rest: end the job."
                )
            at_end_of_backward(self._end_step)
            self._backward_id, self._pending = backward, {i for i, other in enumerate(self._layouts) if other.numel}
            aggregator.begin()
        if output.numel() != layout.numel:
            raise Unsupported(
                f"rank {runtime.rank()}: FSDP gives {output.numel()} elements for {layout.numel} of {layout.names}: "
                "some have no gradient, or were frozen or unfrozen since. Call set_reduce_scatter_unused_params(True) "
                "on the model, or set_all_reduce_hook anew."
            )
        used_here(output)  # FSDP made it on another stream, and may free it as soon as the hook has returned
        self._pending.discard(index)

        def deliver(update: Tensor | None) -> None:
            if update is not None:
                used_here(output)
                output.copy_(update)

        aggregator.submit(SourceBucket(layout, output, deliver), last=not self._pending)
        aggregator.wait()

    def _end_step(self) -> None:
        self._backward_id = -1
        self._require_aggregator().end()


def shard_shape(name: str, parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter's shard in the output of the reduce-scatter: on every rank that of the largest.

    Raises:
        Unsupported: the parameter is not sharded over a mesh of one dimension.
    """
    if not isinstance(parameter, DTensor):
        raise Unsupported(
            f"{name} is not sharded by FSDP. Call fully_shard first; reshard() if a forward has left the model whole; "
            "no hook would aggregate an ignored parameter."
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
    """Return the parameters of an FSDP group, in the order of its reduce-scatter."""
    group = state._fsdp_param_group
    infos = [] if group is None else [parameter._module_info for parameter in group.fsdp_params]
    return [getattr(info.module, info.param_name) for info in infos]


def set_all_reduce_hook(
    model: Module, policy: str | Policy, group: Any, weighted: bool | None = None, seed: int = 0
) -> AllReduceHookState:
    """Aggregate the gradients of a model sharded by ``fully_shard`` over its replicas with a policy.

    It calls ``FSDPModule.set_all_reduce_hook`` of every FSDPModule in ``model``. Policy ``mean`` equals native HSDP.
    hvdbridge need not be initialized; if it is, any backend will do. Collective over all ranks of the job. As in
    HSDP, the user makes sure that replicas begin with equal parameters (the same seed, or the same checkpoint).

    For the policy, a parameter is this rank's shard, of shape ``[ceil(rows / shards), ...]``, padded with zeros on the
    last shards. So decisions per parameter (largest elements, a scale, low rank) are made per shard.

    To accumulate gradients use ``set_requires_gradient_sync(False)``. After ``set_requires_all_reduce(False)``, FSDP
    still calls hooks, so every backward is aggregated.

    Args:
        model: a model after ``fully_shard(..., mesh=)``, with a mesh whose one dimension is that of the shards.
        policy: a spec string or a policy, of scope "bucket".
        group: the ranks that hold the same shard as this one: the mesh dimension of replicas, its process group, or an
            iterable of ranks.
        weighted: True: exchange ``state.weight`` in every step; False: never; None: the first step decides.
        seed: the seed of the random numbers that the replicas share.

    Raises:
        SpecError: the spec string is invalid.
        Unsupported: native HSDP, tensor parallelism, parameters that FSDP does not shard, or a policy of scope "step".
        ConfigurationError: the policy acts after the optimizer's step, or is not defined for so few ranks.
        RankMismatch: the ranks of ``group`` hold different shards, models or policies.

    Source of the hook: ``torch.distributed.fsdp.FSDPModule.set_all_reduce_hook``.
    """
    return AllReduceHookState(model, from_spec(policy), group, weighted, seed)
