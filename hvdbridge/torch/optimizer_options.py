"""The arguments of ``hvd.DistributedOptimizer``: checks, and their translation into a policy and names."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Aggregated, Exchange, Flow, Policy, State, acts_after_step
from hvdbridge.policy.bucket import DDP_MB, Bucket
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.reduction.source import default_bucket_mb
from hvdbridge.torch.basics import Adasum, Average, Max, Min, Product, Sum
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.operations import Operations
from hvdbridge.torch.process_sets import ProcessSet, global_process_set
from hvdbridge.training import runtime

ALL_REDUCE_OPS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}
"""The ``op`` of the policy's all-reduce for each of Horovod's reductions."""

POLICY_CONFLICT = "policy= stands in the place of op, compression and gradient_predivide_factor: give one"


@dataclass(frozen=True, repr=False)
class Reduction(Policy):
    """Policy that aggregates gradients as Horovod does: compress, scale, reduce, scale, decompress.

    ``Average`` divides after the sum. A compressor of ``hvd.Compression`` converts the whole bucket. Any other class or
    object with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)`` converts each gradient
    separately.

    Attributes:
        op: one of ``Average``, ``Sum``, ``Min``, ``Max``, ``Product``.
        compression: the compressor.
        predivide: the divisor before the sum; the division after it uses ``size / predivide``.
    """

    op: Any = Average
    compression: Any = Compression.none
    predivide: float = 1.0
    bucket_mb = DDP_MB

    @property
    def rounds(self) -> int | None:
        """1 if the compressor takes the whole bucket; None for other compressors, which may keep state."""
        return 1 if self._takes_bucket else None

    @property
    def _takes_bucket(self) -> bool:
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    def __post_init__(self) -> None:
        """Skip the checks of policies: :func:`DistributedOptimizer` checks these objects of Horovod's API."""

    def __repr__(self) -> str:
        """Return a text without object addresses, because ranks compare it."""
        compression = getattr(self.compression, "__qualname__", type(self.compression).__qualname__)
        return f"Reduction(op={self.op}, compression={compression}, predivide={self.predivide})"

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if self._takes_bucket:
            return Aggregated((yield from self._reduce(bucket.buffer, bucket.size)))
        results = []
        for gradient in bucket.grads.values():
            results.append((yield from self._reduce(gradient, bucket.size)).reshape(-1))
        return Aggregated(torch.cat(results))

    def _reduce(self, tensor: Tensor, size: int) -> Exchange:
        compressed, context = self.compression.compress(tensor)
        if self.predivide != 1.0:
            compressed = compressed * (1.0 / self.predivide)
        reduced = yield AllReduce(compressed, ALL_REDUCE_OPS[self.op])
        factor = self.predivide / size if self.op == Average else 1.0
        if factor != 1.0:
            reduced = reduced.mul_(factor)
        return self.compression.decompress(reduced, context)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Settings:
    """Options of an optimizer that must be equal on all ranks."""

    policy: Policy
    groups: int | Sequence[Sequence[Tensor]] | None
    sparse_as_dense: bool


def check_options(
    op: Any, predivide: float, passes: int, groups: Any, policy: object, process_set: ProcessSet, delta: bool
) -> None:
    """Check options of ``DistributedOptimizer``.

    Args:
        delta: whether the optimizer combines steps by Adasum.

    Raises:
        ValueError: an option is invalid, or two options contradict each other.
        NotImplementedError: Adasum on a process set.
    """
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average: it splits that division in two")
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if delta and process_set is not global_process_set:
        raise NotImplementedError("Adasum takes the global process set only")
    if delta and policy is not None:
        raise ValueError(POLICY_CONFLICT)
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    if not isinstance(groups, list):
        raise ValueError("groups takes a number that is not negative, or a list of lists of parameters")
    members = [p for group in groups for p in group]
    if any(not isinstance(p, Tensor) for p in members):
        raise ValueError("groups: its lists hold parameters (torch.Tensor)")
    if len(set(members)) < len(members):
        raise ValueError("groups: a parameter can be in one group only")


def choose_policy(policy: str | Policy | None, op: Any, compression: Any, predivide: float) -> Policy:
    """Return ``policy``, or by default the session's policy, or a :class:`Reduction` of the other arguments.

    Raises:
        ValueError: ``op`` is unknown, or ``policy`` is combined with one of the other arguments.
        ConfigurationError: the policy acts after the optimizer's step.
    """
    if op != Adasum and op not in ALL_REDUCE_OPS:
        raise ValueError(f"op={op!r} is not one of hvd.Average, Sum, Adasum, Min, Max, Product")
    is_default = op == Average and compression is Compression.none and predivide == 1.0
    if policy is not None:
        if not is_default:
            raise ValueError(POLICY_CONFLICT)
        return _check_supported(from_spec(policy))
    default = from_spec(runtime.current().policy)
    if is_default and label(default) != "mean":
        return _check_supported(default)
    if label(default) != "mean":
        text = f"the policy {label(default)!r} is not used: the script asks for an op or a compression of its own"
        warnings.warn(text, stacklevel=3)
    return Reduction(op, compression, predivide)


def _check_supported(policy: Policy) -> Policy:
    """Return ``policy`` unless it acts after the optimizer's step, where a DistributedOptimizer sends nothing."""
    if acts_after_step(policy):
        raise ConfigurationError(
            f"DistributedOptimizer: {label(policy)} acts after the optimizer's step. Use a GradientSynchronizer, or "
            "another policy."
        )
    return policy


def names_of(
    param_groups: Sequence[Mapping[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the name of each parameter; ``allreduce.noname.<group>.<index>`` without ``named_parameters``.

    Raises:
        ValueError: ``named_parameters`` are not tuples, repeat a name, or lack a parameter of the optimizer.
    """
    numbered = {p: f"{i}.{j}" for i, group in enumerate(param_groups) for j, p in enumerate(group["params"])}
    if named_parameters is None:
        return {p: f"allreduce.noname.{number}" for p, number in numbered.items()}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters takes tuples (name, parameter), as model.named_parameters() gives them")
    if repeated := sorted(name for name, times in Counter(name for name, _ in named).items() if times > 1):
        raise ValueError(f"named_parameters: names must be unique, these occur twice: {', '.join(repeated)}")
    names = {p: name for name, p in named}
    if missing := [number for p, number in numbered.items() if p not in names]:
        raise ValueError(
            f"named_parameters names no parameter for {len(missing)} of the optimizer's (group.index): "
            f"{', '.join(missing[:8])}. Pass the names of all, or none."
        )
    return names


def bucket_mb(operations: Operations, policy: Policy, ranks: Iterable[int]) -> float:
    """Return the bucket size in MiB: ``HOROVOD_FUSION_THRESHOLD``, the session's, or the default for ``ranks``."""
    bucket_bytes = operations.settings.bucket_bytes
    if bucket_bytes is not None:
        return bucket_bytes / 2**20
    world = operations.session.communicator
    nodes = [world.nodes[rank] for rank in ranks] if world.nodes else ()
    default = default_bucket_mb(policy, nodes, world.capabilities.blocks_host)
    return operations.session.config.fixed_bucket_mb(default, "hvdbridge.torch.DistributedOptimizer")
