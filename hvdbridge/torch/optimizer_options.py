"""The arguments of ``hvd.DistributedOptimizer``: what they mean, and which are refused."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Aggregated, Exchange, Flow, Policy, State
from hvdbridge.policy.bucket import DDP_MB, Bucket
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.reduction.source import usual_bucket_mb
from hvdbridge.torch.basics import Adasum, Average, Max, Min, Product, Sum
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.operations import Operations
from hvdbridge.torch.process_sets import ProcessSet, global_process_set
from hvdbridge.training import runtime

OPS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}
"""Horovod's reductions and ours."""

ONE_WAY = "policy= stands in the place of op, compression and gradient_predivide_factor: give one"


@dataclass(frozen=True, repr=False)
class Reduction(Policy):
    """What Horovod does to a gradient: compress, scale, reduce, scale, decompress.

    ``Average`` divides after the sum. A compressor of ``hvd.Compression`` gets the whole bucket. Any other class or
    object with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)`` gets each gradient by
    itself.
    """

    op: Any = Average
    compression: Any = Compression.none
    predivide: float = 1.0
    bucket_mb = DDP_MB

    @property
    def rounds(self) -> int | None:
        """One for a compressor of the whole bucket; an object of the user's may remember what it sees."""
        return 1 if self._whole else None

    @property
    def _whole(self) -> bool:
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    def __post_init__(self) -> None:
        """Checks nothing: :func:`DistributedOptimizer` checks these objects of Horovod's API."""

    def __repr__(self) -> str:
        """Ranks compare this text, so it holds no address of an object."""
        compression = getattr(self.compression, "__qualname__", type(self.compression).__qualname__)
        return f"Reduction(op={self.op}, compression={compression}, predivide={self.predivide})"

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if self._whole:
            return Aggregated((yield from self._reduce(bucket.buffer, bucket.size)))
        parts = []
        for gradient in bucket.grads.values():
            parts.append((yield from self._reduce(gradient, bucket.size)).reshape(-1))
        return Aggregated(torch.cat(parts))

    def _reduce(self, tensor: Tensor, size: int) -> Exchange:
        sent, context = self.compression.compress(tensor)
        if self.predivide != 1.0:
            sent = sent * (1.0 / self.predivide)
        total = yield AllReduce(sent, OPS[self.op])
        factor = self.predivide / size if self.op == Average else 1.0
        if factor != 1.0:
            total = total.mul_(factor)
        return self.compression.decompress(total, context)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Settings:
    """Options of an optimizer that must be equal on all ranks."""

    policy: Policy
    groups: int | Sequence[Sequence[Tensor]] | None
    sparse_as_dense: bool


def check_options(
    op: Any, predivide: float, passes: int, groups: Any, policy: object, process_set: ProcessSet, delta: bool
) -> None:
    """Refuse options without meaning.

    Args:
        delta: the optimizer combines steps, by Adasum.

    Raises:
        ValueError: an option, or two of them together, have no meaning.
        NotImplementedError: Adasum on a process set.
    """
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average: it splits that division in two")
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if delta and process_set is not global_process_set:
        raise NotImplementedError("Adasum takes the global process set only")
    if delta and policy is not None:
        raise ValueError(ONE_WAY)
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
    """The policy that these arguments, or the session, ask for."""
    if op != Adasum and op not in OPS:
        raise ValueError(f"op={op!r} is not one of hvd.Average, Sum, Adasum, Min, Max, Product")
    plain = op == Average and compression is Compression.none and predivide == 1.0
    if policy is not None:
        if not plain:
            raise ValueError(ONE_WAY)
        return from_spec(policy)
    default = from_spec(runtime.current().policy)
    if plain and label(default) != "mean":
        return default
    if label(default) != "mean":
        text = f"the policy {label(default)!r} is not used: the script asks for an op or a compression of its own"
        warnings.warn(text, stacklevel=3)
    return Reduction(op, compression, predivide)


def names_of(
    param_groups: Sequence[Mapping[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """The name of each parameter.

    Raises:
        ValueError: not pairs, a name twice, or a parameter of the optimizer without a name.
    """
    numbered = {p: f"{i}.{j}" for i, group in enumerate(param_groups) for j, p in enumerate(group["params"])}
    if named_parameters is None:
        return {p: f"allreduce.noname.{number}" for p, number in numbered.items()}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters takes tuples (name, parameter), as model.named_parameters() gives them")
    if twice := sorted(name for name, times in Counter(name for name, _ in named).items() if times > 1):
        raise ValueError(f"named_parameters: names must be unique, these occur twice: {', '.join(twice)}")
    found = {p: name for name, p in named}
    if missing := [number for p, number in numbered.items() if p not in found]:
        raise ValueError(
            f"named_parameters names no parameter for {len(missing)} of the optimizer's (group.index): "
            f"{', '.join(missing[:8])}. Pass the names of all, or none."
        )
    return found


def bucket_mb(operations: Operations, policy: Policy, ranks: Iterable[int]) -> float:
    """``HOROVOD_FUSION_THRESHOLD`` in MiB, or the session's size, or the usual size among these ranks."""
    given = operations.settings.bucket_bytes
    if given is not None:
        return given / 2**20
    world = operations.session.communicator
    nodes = [world.nodes[rank] for rank in ranks] if world.nodes else ()
    usual = usual_bucket_mb(policy, nodes, world.capabilities.blocks_host)
    return operations.session.config.fixed_bucket_mb(usual, "hvdbridge.torch.DistributedOptimizer")
