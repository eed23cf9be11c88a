"""Adapters between Horovod's compressions and policies, in both directions.

Rules:

1. A compression is any class, or object, with ``compress(tensor) -> (tensor, context)`` and
   ``decompress(tensor, context) -> tensor``. Horovod compresses each parameter's gradient, sums the compressed tensors,
   divides the sum by the number of ranks and decompresses it. The policy computes in this order, because in half
   precision scaling first rounds differently.
2. Only a policy with one all-reduce and no state can act as a compression: Horovod performs that all-reduce, between
   ``compress`` and ``decompress``. Horovod passes neither the number of the step nor the parameter's name, so a policy
   that depends on one of them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policies import from_spec, label
from hvdbridge.policies.dense import Sum, share_of_sum
from hvdbridge.policies.wrappers import unmatched_patterns
from hvdbridge.policy.base import Aggregated, Early, Flow, Foreign, Policy, State, acts_after_step
from hvdbridge.policy.bucket import Bucket, Layout, scale
from hvdbridge.policy.collectives import AllReduce, Collective


@dataclass(frozen=True, eq=False, repr=False)
class HorovodCompression(Foreign):
    """See :func:`from_horovod_compression`."""

    compression: Any

    unequal_weights = True

    def __post_init__(self) -> None:
        missing = [name for name in ("compress", "decompress") if not callable(getattr(self.compression, name, None))]
        if missing:
            raise ConfigurationError(
                f"{self.compression!r} is no compression: it has no {' and no '.join(missing)}. It needs "
                "compress(tensor) -> (tensor, context) and decompress(tensor, context) -> tensor"
            )

    def __repr__(self) -> str:
        kind = self.compression if isinstance(self.compression, type) else type(self.compression)
        return f"from_horovod_compression({kind.__qualname__})"

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        scale(bucket.buffer, share_of_sum(bucket))
        compressed = [self.compression.compress(gradient) for gradient in bucket.grads.values()]
        payloads = [payload for payload, _ in compressed]
        totals: list[Tensor] = [torch.empty(0, device="cpu")] * len(payloads)
        for dtype in dict.fromkeys(payload.dtype for payload in payloads):  # one all-reduce per dtype
            indices = [i for i, payload in enumerate(payloads) if payload.dtype == dtype]
            total = yield AllReduce(torch.cat([payloads[i].reshape(-1) for i in indices]))
            total = total.div_(bucket.size) if dtype.is_floating_point else total // bucket.size
            for i, payload in zip(indices, total.split([payloads[i].numel() for i in indices]), strict=True):
                totals[i] = payload.view(payloads[i].shape)
        updates = []
        for total, (_, context), (name, gradient) in zip(totals, compressed, bucket.grads.items(), strict=True):
            update = self.compression.decompress(total, context)
            if update.numel() != gradient.numel():
                raise Unsupported(
                    f"rank {bucket.rank}: {self!r} decompressed {name!r} to {list(update.shape)}, expected "
                    f"{list(gradient.shape)}. What it sends must have a shape that is the same on all ranks."
                )
            updates.append(update.reshape(-1).to(bucket.buffer.dtype))
        return Aggregated(torch.cat(updates))


def from_horovod_compression(compression: Any) -> Policy:
    """Return a policy that compresses gradients, sums over ranks, divides by their number, and decompresses.

    Raises:
        ConfigurationError: ``compression`` lacks ``compress`` or ``decompress``.

    >>> class Half:
    ...     @staticmethod
    ...     def compress(tensor):
    ...         return tensor.half(), tensor.dtype
    ...     @staticmethod
    ...     def decompress(tensor, dtype):
    ...         return tensor.to(dtype)
    >>> from hvdbridge.execution.simulation import simulate
    >>> simulate(from_horovod_compression(Half), [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}])[0]
    {'w': tensor([1.5000])}
    """
    return HorovodCompression(compression)


NAME = "tensor"
"""The name of each tensor in a :class:`PolicyCompression`."""


class _StepRead(Exception):
    """A policy has read the number of the step."""


class _UnknownStep(int):
    """A number that raises :class:`_StepRead` when it is compared or used in arithmetic."""

    def _read(self, *_: object) -> Any:
        raise _StepRead

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __index__ = __int__ = __float__ = __neg__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __mod__ = _read
    __divmod__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __pow__ = _read
    __hash__ = __str__ = __repr__ = __format__ = _read


class PolicyCompression:
    """See :func:`to_horovod_compression`."""

    def __init__(self, policy: str | Policy) -> None:
        self.policy = from_spec(policy)
        probe = torch.zeros(64, 64, device="cpu")  # a matrix, which low rank compresses
        if self.policy.scope != "bucket":
            raise self._unsupported("it needs all gradients of a step at once")
        if has_leaves(self.policy.init({NAME: probe})):
            raise self._unsupported("it keeps state between steps")
        if acts_after_step(self.policy):
            raise self._unsupported("it acts after the optimizer's step")
        if patterns := unmatched_patterns(self.policy, [NAME]):
            raise self._unsupported(f"Horovod passes no names for {', '.join(patterns)} to match")
        try:
            self.decompress(*self.compress(probe, _UnknownStep()))
        except _StepRead:
            raise self._unsupported("it depends on the number of the step, which Horovod does not pass") from None
        if _has_sum(self.policy):
            raise self._unsupported("Horovod divides that sum by the number of ranks, so it would be the mean")
        inners = self.policy.inners().values()
        for inner in inners:  # the probe matches one rule of a partition
            PolicyCompression(inner)
        if not inners and (self.policy.rounds or 1) > 1:  # a policy may send a small probe in one round
            raise self._unsupported("it has a second round")

    def __repr__(self) -> str:
        return f"to_horovod_compression({label(self.policy)!r})"

    def compress(self, tensor: Tensor, step: int = 0) -> tuple[Tensor, Any]:
        """Return the tensor that the policy all-reduces for this gradient, and as context the flow suspended there."""
        layout = Layout({NAME: tensor.shape})
        flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        flow = self.policy.aggregate(Bucket(flat, layout, step=step), self.policy.init({NAME: tensor}))
        request = _resume(flow, None)
        if isinstance(request, Aggregated):
            raise self._unsupported("it asks for nothing")
        if isinstance(request, Early):
            raise self._unsupported("it hands its update out before it has asked for anything")
        if not isinstance(request, AllReduce) or request.op != "sum" or request.group != "world":
            raise self._unsupported(f"it asks for {request.signature()}")
        return request.tensor, (flow, tensor.shape, tensor.dtype)

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Resume the flow of :meth:`compress` with the average over ranks, and return the policy's update."""
        flow, shape, dtype = context
        request = _resume(flow, tensor)
        if isinstance(request, Collective):
            raise self._unsupported(f"it asks for {request.signature()} in a second round")
        update: Tensor = request.update
        return update.view(shape).to(dtype)

    def _unsupported(self, why: str) -> Unsupported:
        return Unsupported(
            f"{label(self.policy)} cannot be a Horovod compression: between compress and decompress stands one "
            f"all-reduce of sums, and {why}. Use DistributedOptimizer(policy=...) or GradientSynchronizer."
        )


def _has_sum(policy: Policy) -> bool:
    return isinstance(policy, Sum) or any(map(_has_sum, policy.inners().values()))


def _resume(flow: Any, tensor: Tensor | None) -> Any:
    """Send ``tensor`` to the flow, and return its next request, or its result if it ends."""
    try:
        return flow.send(tensor)
    except StopIteration as end:
        return end.value


def to_horovod_compression(policy: str | Policy) -> PolicyCompression:
    """Return a compression for ``hvd.DistributedOptimizer(compression=...)`` and ``hvd.allreduce(compression=...)``,
    with ``op=hvd.Average``.

    Raises:
        Unsupported: the policy keeps state, needs all gradients of a step at once, depends on the number of the step or
            on parameters' names, acts after the optimizer's step, is ``sum`` (Horovod divides), or has other
            collectives than one all-reduce of sums.
        SpecError: the spec string is invalid.

    >>> half = to_horovod_compression("mean")
    >>> sent, context = half.compress(torch.tensor([1.0, 2.0]))
    >>> half.decompress(sent, context)
    tensor([1., 2.])
    """
    return PolicyCompression(policy)


def has_leaves(state: Mapping[str, Any]) -> bool:
    """Return whether a nested dict of state holds any tensor."""
    return any(has_leaves(child) if isinstance(child, Mapping) else True for child in state.values())
