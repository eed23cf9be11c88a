"""What a flow reads of its step: which values decide its course, and which a graph reads from a table on the device.

A traced bucket takes the place of a bucket. Its flow records each decision (:meth:`Bucket.decide
<hvdbridge.policy.bucket.Bucket.decide>`). While it is captured, its numbers and integers are rows of a :class:`Table`,
and any other use of the step number or of the weights raises :class:`NotCapturable`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hvdbridge.policy.bucket import Bucket, Layout, Number, Ranks, Weights, accept_former
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.capture import NotCapturable

TABLE_ROWS = 1 << 14
"""Numbers and integers that all graphs of a synchronizer can read."""

Choice = Callable[[int, Weights], Any]
Compute = Callable[[int, Ranks], Sequence[int]]


class Table:
    """Numbers of one step, which the host writes and graphs read: int64 ``[TABLE_ROWS]`` on ``device``.

    There are two pinned copies, because the device may read one while the host already writes those of the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(TABLE_ROWS, dtype=torch.int64, device=device)
        self.used = 0
        pinned = device.type == "cuda"
        self._copies = [torch.zeros(TABLE_ROWS, dtype=torch.int64, pin_memory=pinned, device="cpu") for _ in range(2)]
        self._read = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._written = 0

    def allocate(self, count: int) -> Tensor:
        """Return the next ``count`` rows.

        Raises:
            NotCapturable: the table is full.
        """
        if self.used + count > TABLE_ROWS:
            raise NotCapturable(f"flows read more than {TABLE_ROWS} numbers per step")
        self.used += count
        return self.values[self.used - count : self.used]

    def write(self, values: Sequence[int]) -> None:
        """Set the first rows, on the current stream. The host waits for the copy of the step before the last one."""
        copy, read = self._copies[self._written % 2], self._read[self._written % 2]
        self._written += 1
        if read is not None:
            read.synchronize()
        copy[: len(values)] = torch.tensor(values, dtype=torch.int64, device="cpu")
        self.values[: len(values)].copy_(copy[: len(values)], non_blocking=True)
        if read is not None:
            read.record()


def bits(number: float) -> int:
    """Return the bits of a double as an int64.

    >>> torch.tensor([bits(0.1)]).view(torch.float64).item()
    0.1
    """
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _refuse(*_: object) -> Any:
    raise NotCapturable(
        "its policy reads Bucket.step or the ranks' weights. "
        "Use Bucket.decide, Bucket.number or Bucket.integers, which a graph can replay"
    )


OPERATIONS = (
    "int index float bool str repr format hash eq ne lt le gt ge add radd sub rsub mul rmul mod rmod floordiv "
    "rfloordiv truediv rtruediv pow rpow divmod rdivmod neg lshift rshift and or xor"
)
Unreadable = type("Unreadable", (), {f"__{name}__": _refuse for name in OPERATIONS.split()})
"""The step number of a captured flow. Each use raises :class:`NotCapturable`; copies of a bucket may have it."""


class TracedStep(int):
    """The step number of a traced flow. Arithmetic gives plain integers, so a policy's own step is another object."""


UNREADABLE: Any = Unreadable()


class UnreadableRanks(Ranks):
    """The ranks of a captured flow. Reading weights that are ``UNREADABLE`` raises :class:`NotCapturable`."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return _refuse() if value is UNREADABLE else value


@dataclass(eq=False)
class Trace:
    """What one run of a flow reads.

    Attributes:
        captured: the flow is captured. Its step number and weights cannot be read.
        table: provides the numbers of a captured flow. None: they are those of this step.
        decisions: each decision with its value.
        rows: first row, number of rows, and function of each number or list of integers.
        sums: the flow has summed floats over ranks, of which libraries may round the terms in another order.
        step, ranks: of the traced bucket. A copy that has others was given them by its policy.
    """

    captured: bool = False
    table: Table | None = None
    decisions: list[tuple[Choice, Any]] = field(default_factory=list)
    rows: list[tuple[int, int, Compute]] = field(default_factory=list)
    sums: bool = False
    step: Any = None
    ranks: Ranks = Ranks()

    def read(self, count: int, compute: Compute) -> Tensor:
        """Return the rows with the values of ``compute``, int64 ``[count]``."""
        assert self.table is not None
        self.rows.append((self.table.used, count, compute))
        return self.table.allocate(count)

    @property
    def values(self) -> list[Any]:
        """The values of the decisions."""
        return [value for _, value in self.decisions]


@dataclass(eq=False)
class TracedBucket(Bucket):
    """A bucket that records what its flow reads of the step. ``origin``: the bucket with the values of this step."""

    trace: Trace = field(default_factory=Trace)
    origin: Bucket = field(default_factory=lambda: Bucket(torch.empty(0), Layout({})))

    @classmethod
    def of(cls, bucket: Bucket, trace: Trace) -> TracedBucket:
        """Return ``bucket`` as one whose flow records into ``trace``."""
        given = {item.name: getattr(bucket, item.name) for item in fields(Bucket)}
        ranks = {item.name: getattr(bucket.ranks, item.name) for item in fields(Ranks)}
        if trace.captured:
            trace.step, trace.ranks = UNREADABLE, UnreadableRanks(**ranks | {"weights": UNREADABLE})
            given["pool"] = BufferPool()
        else:
            trace.step, trace.ranks = TracedStep(bucket.step), Ranks(**ranks)
        return cls(**given | {"step": trace.step, "ranks": trace.ranks}, trace=trace, origin=bucket)

    def decide(self, choose: Callable[[int, Weights], Any]) -> Any:
        made = choose
        if self.step is not self.trace.step:
            step, of_weights = self.step, made
            made = lambda _, weights: of_weights(step, weights)  # noqa: E731
        if self.ranks is not self.trace.ranks:
            weights, of_step = self.ranks.weights, made
            made = lambda step, _: of_step(step, weights)  # noqa: E731
        value = made(self.origin.step, self.origin.weights)
        self.trace.decisions.append((made, value))
        return value

    def number(self, compute: Callable[[Ranks], float]) -> Number:
        if self.ranks is not self.trace.ranks:
            return compute(self.ranks)
        if self.trace.table is None:
            return compute(self.origin.ranks)
        return self.trace.read(1, lambda _, ranks: [bits(compute(ranks))]).view(torch.float64)[0]

    def integers(self, compute: Callable[[int], Sequence[int]]) -> Sequence[int] | Tensor:
        if self.step is not self.trace.step:
            return compute(self.step)
        values = compute(self.origin.step)
        if self.trace.table is None:
            return values
        return self.trace.read(len(values), lambda step, _: compute(step))


TracedBucket.__init__ = accept_former(TracedBucket.__init__)  # type: ignore[method-assign]

aten = torch.ops.aten
ON_THE_HOST = {
    aten._local_scalar_dense.default: "the host reads a tensor",
    aten.lift_fresh.default: "the host's data are copied to the device",
    aten.nonzero.default: "the shape depends on the values",
    aten.masked_select.default: "the shape depends on the values",
    aten._unique2.default: "the shape depends on the values",
}
COPIES = {aten.copy_.default, aten._to_copy.default}


class CaptureMode(TorchDispatchMode):
    """Refuses operations for which the host waits or whose data it provides, before CUDA invalidates the capture.

    Raises:
        NotCapturable: from within the operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ON_THE_HOST and not (func is aten.lift_fresh.default and args[0].dim() == 0):  # fills memory
            raise NotCapturable(f"{func}: {ON_THE_HOST[func]}")
        if func in COPIES:
            devices = {tensor.device.type for tensor in args if isinstance(tensor, Tensor)}
            devices |= {torch.device(to).type for to in [(kwargs or {}).get("device")] if to is not None}
            if len(devices) > 1:
                raise NotCapturable(f"{func}: copies between host and device")
        return func(*args, **(kwargs or {}))
