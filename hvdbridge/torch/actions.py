"""Execution of raw operations: for each kind a function over one communicator.

Rules:

1. Every function is called by the thread of :class:`~hvdbridge.torch.operations.Operations`, without autograd.
2. It returns the results of all its operations in order. The caller copies them to where in-place operations want them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Communicator
from hvdbridge.policy.collectives import AllGather, AllToAll, Broadcast
from hvdbridge.torch import arithmetic
from hvdbridge.torch.arithmetic import as_bytes, from_bytes
from hvdbridge.torch.coordinator import Decision, Request


@dataclass(eq=False)
class Pending:
    """An operation of this rank that is under way.

    Attributes:
        inputs: what this rank sends, without autograd; kept until the operation is complete.
        targets: of an in-place operation, the tensors that take the results.
        grouped: whether the result is several tensors.
        results: empty until the operation is complete.
        sizes: of the decision.
        error, cause: why the operation failed.
        since, decided: the monotonic times of its submission and of the decision (0: not yet).
        ready: on CUDA, recorded when the inputs were complete.
        after: on CUDA, recorded when the results are complete.
        offer: of a channel, this rank's part in the exchange between the members.
        opened: called with the channel.
    """

    request: Request
    inputs: list[Tensor]
    targets: Sequence[Tensor] | None = None
    grouped: bool = False
    offer: Any = None
    opened: Callable[[Any], None] | None = None
    results: list[Tensor] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    error: str = ""
    cause: BaseException | None = None
    since: float = field(default_factory=time.monotonic)
    decided: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    ready: Any = None
    after: Any = None

    @property
    def key(self) -> tuple[int, str]:
        return self.request.process_set, self.request.name

    @property
    def result(self) -> Any:
        return tuple(self.results) if self.grouped else self.results[0] if self.results else None

    def take(self, values: list[Tensor]) -> None:
        """Keep the results; those of an in-place operation are copied to where they belong."""
        for target, value in zip(self.targets or (), values, strict=False):
            if target.data_ptr() != value.data_ptr() or target.stride() != value.stride():
                target.detach().copy_(value)
        self.results = values if self.targets is None else list(self.targets)


def _allreduce(comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
    """Fused: one buffer for each type."""
    tensors = [tensor for job in jobs for tensor in job.inputs]
    in_place = [job.targets is not None for job in jobs for _ in job.inputs]
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        numbers = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        first, alone = tensors[numbers[0]], len(numbers) == 1
        if not alone:
            buffer = torch.cat([tensors[i].reshape(-1) for i in numbers])
        elif in_place[numbers[0]] and first.is_contiguous():
            buffer = first.view(-1)
        else:
            buffer = _copy(first).view(-1)
        answer = arithmetic.all_reduce(buffer, jobs[0].request.op, jobs[0].request.factors, comm).view(-1)
        parts = answer.split([tensors[i].numel() for i in numbers])
        for i, part in zip(numbers, parts, strict=True):
            part = part.view(tensors[i].shape)
            results[i] = part if alone or in_place[i] else part.clone()
    return results


def _adasum(comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
    return [arithmetic.adasum(_copy(tensor), jobs[0].request.factors, comm) for tensor in jobs[0].inputs]


def _reducescatter(comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
    request = jobs[0].request
    return [arithmetic.reduce_scatter(tensor, request.op, request.factors, comm) for tensor in jobs[0].inputs]


def _allgather(comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
    """All tensors of a rank in one message, as long as the longest."""
    rows, inputs = decision.sizes, jobs[0].inputs  # [member][tensor]
    widths = [_width(tensor) for tensor in inputs]
    lengths = [[count * width for count, width in zip(each, widths, strict=True)] for each in rows]
    mine = torch.cat([as_bytes(tensor) for tensor in inputs])
    buffer = mine.new_zeros(max(map(sum, lengths)))
    buffer[: mine.numel()] = mine
    answer = comm.execute(AllGather(buffer))
    parts = [row[: sum(each)].split(each) for row, each in zip(answer, lengths, strict=True)]
    return [
        from_bytes(torch.cat(of_ranks), tensor.dtype, (sum(counts), *tensor.shape[1:]))
        for of_ranks, counts, tensor in zip(zip(*parts, strict=True), zip(*rows, strict=True), inputs, strict=True)
    ]


def _broadcast(comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
    """Fused: the bytes of all in one message."""
    (root,) = decision.sizes
    tensors = [tensor for job in jobs for tensor in job.inputs]
    if len(tensors) == 1 and jobs[0].targets is not None and tensors[0].is_contiguous():
        buffer = as_bytes(tensors[0])
    else:
        buffer = torch.cat([as_bytes(tensor) for tensor in tensors])
    parts = iter(comm.execute(Broadcast(buffer, root)).split([tensor.nbytes for tensor in tensors]))
    results = []
    for job in jobs:
        for tensor, part in zip(job.inputs, parts, strict=False):
            there = job.targets is not None and (comm.rank == root or part.data_ptr() == tensor.data_ptr())
            results.append(tensor if there else from_bytes(part, tensor.dtype, tensor.shape))
    return results


def _broadcast_object(comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
    root, length = decision.sizes
    data = jobs[0].inputs[0]
    if comm.rank != root:
        data = torch.empty(length, dtype=torch.uint8, device="cpu")
    return [comm.execute(Broadcast(data, root))]


def _alltoall(comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
    splits, tensor = decision.sizes, jobs[0].inputs[0]  # [from][to]
    width = _width(tensor)
    data = as_bytes(tensor)
    rows = data.new_zeros(comm.size, max(map(max, splits)) * width)
    lengths = [count * width for count in splits[comm.rank]]
    for row, part in zip(rows, data[: sum(lengths)].split(lengths), strict=True):
        row[: part.numel()] = part
    answer = comm.execute(AllToAll(rows))
    received = [each[comm.rank] for each in splits]
    parts = [row[: count * width] for row, count in zip(answer, received, strict=True)]
    output = from_bytes(torch.cat(parts), tensor.dtype, (sum(received), *tensor.shape[1:]))
    return [output, torch.tensor(received, dtype=torch.int32, device="cpu")]


def _nothing(comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
    """A barrier, and the end of a join, consist of the agreement alone."""
    return []


Action = Callable[[Communicator, Decision, list[Pending]], list[Tensor]]
ACTIONS: dict[str, Action] = {
    "allreduce": _allreduce, "adasum": _adasum, "allgather": _allgather, "broadcast": _broadcast,
    "broadcast_object": _broadcast_object, "alltoall": _alltoall, "reducescatter": _reducescatter, "barrier": _nothing,
    "join": _nothing,
}  # fmt: skip


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _width(tensor: Tensor) -> int:
    """The bytes of one row."""
    return tensor.element_size() * math.prod(tensor.shape[1:])
