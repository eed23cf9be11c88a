"""Executors of raw operations (``hvd.allreduce`` and the others): one function per kind, over one communicator.

Rules:

1. Only the thread of :class:`~hvdbridge.torch.operations.Operations` calls these functions, without autograd.
2. A function returns the results of all its operations in order. :meth:`Pending.set_results` stores them.
3. Only all-reduces and broadcasts are fused. The other functions receive exactly one operation.
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
    """A raw operation of this rank, from its submission to its end.

    Attributes:
        inputs: tensors that this rank contributes, detached from autograd; released when the operation ends.
        targets: tensors that an in-place operation overwrites with the results; None otherwise.
        grouped: whether :attr:`result` is a tuple of tensors.
        member_info: the object that this rank sends to the other members of a channel.
        on_open: callback that receives the opened channel.
        results: output tensors; empty until the operation is complete.
        sizes: the decision's :attr:`~hvdbridge.torch.coordinator.Decision.sizes`.
        error, cause: message and exception of a failure.
        submitted_at, decided_at: monotonic times in seconds of the submission and of the decision (0: undecided).
        done: set when the operation has completed or failed.
        inputs_ready, results_ready: CUDA events after the kernels that write inputs and results; None on CPUs.
    """

    request: Request
    inputs: list[Tensor]
    targets: Sequence[Tensor] | None = None
    grouped: bool = False
    member_info: Any = None
    on_open: Callable[[Any], None] | None = None
    results: list[Tensor] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    error: str = ""
    cause: BaseException | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    decided_at: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    inputs_ready: Any = None
    results_ready: Any = None

    @property
    def key(self) -> tuple[int, str]:
        return self.request.process_set, self.request.name

    @property
    def result(self) -> Any:
        return tuple(self.results) if self.grouped else self.results[0] if self.results else None

    def set_results(self, values: list[Tensor]) -> None:
        """Store the results; copy those of an in-place operation into :attr:`targets`."""
        for target, value in zip(self.targets or (), values, strict=False):
            if target.data_ptr() != value.data_ptr() or target.stride() != value.stride():
                target.detach().copy_(value)
        self.results = values if self.targets is None else list(self.targets)


def _allreduce(comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
    """Reduce all tensors in one fused buffer per dtype."""
    tensors = [tensor for operation in operations for tensor in operation.inputs]
    in_place = [operation.targets is not None for operation in operations for _ in operation.inputs]
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        first, single = tensors[indices[0]], len(indices) == 1
        if not single:
            buffer = torch.cat([tensors[i].reshape(-1) for i in indices])
        elif in_place[indices[0]] and first.is_contiguous():
            buffer = first.view(-1)
        else:
            buffer = _clone(first).view(-1)
        reduced = arithmetic.all_reduce(buffer, operations[0].request.op, operations[0].request.factors, comm).view(-1)
        chunks = reduced.split([tensors[i].numel() for i in indices])
        for i, chunk in zip(indices, chunks, strict=True):
            chunk = chunk.view(tensors[i].shape)
            results[i] = chunk if single or in_place[i] else chunk.clone()
    return results


def _adasum(comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
    return [arithmetic.adasum(_clone(tensor), operations[0].request.factors, comm) for tensor in operations[0].inputs]


def _reducescatter(comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
    request = operations[0].request
    return [arithmetic.reduce_scatter(tensor, request.op, request.factors, comm) for tensor in operations[0].inputs]


def _allgather(comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
    """Gather all tensors of a member as one byte message, padded to the longest member's message."""
    row_counts, inputs = decision.sizes, operations[0].inputs  # [member][tensor]
    row_bytes = [_row_bytes(tensor) for tensor in inputs]
    lengths = [[count * width for count, width in zip(counts, row_bytes, strict=True)] for counts in row_counts]
    message = torch.cat([as_bytes(tensor) for tensor in inputs])
    padded = message.new_zeros(max(map(sum, lengths)))
    padded[: message.numel()] = message
    gathered = comm.execute(AllGather(padded))
    chunks = [row[: sum(counts)].split(counts) for row, counts in zip(gathered, lengths, strict=True)]
    return [
        from_bytes(torch.cat(parts), tensor.dtype, (sum(counts), *tensor.shape[1:]))
        for parts, counts, tensor in zip(zip(*chunks, strict=True), zip(*row_counts, strict=True), inputs, strict=True)
    ]


def _broadcast(comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
    """Broadcast all tensors, of any dtypes, as one byte message."""
    (root,) = decision.sizes
    tensors = [tensor for operation in operations for tensor in operation.inputs]
    if len(tensors) == 1 and operations[0].targets is not None and tensors[0].is_contiguous():
        buffer = as_bytes(tensors[0])
    else:
        buffer = torch.cat([as_bytes(tensor) for tensor in tensors])
    chunks = iter(comm.execute(Broadcast(buffer, root)).split([tensor.nbytes for tensor in tensors]))
    results = []
    for operation in operations:
        for tensor, chunk in zip(operation.inputs, chunks, strict=False):
            in_place = operation.targets is not None and (comm.rank == root or chunk.data_ptr() == tensor.data_ptr())
            results.append(tensor if in_place else from_bytes(chunk, tensor.dtype, tensor.shape))
    return results


def _broadcast_object(comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
    root, length = decision.sizes
    data = operations[0].inputs[0]
    if comm.rank != root:
        data = torch.empty(length, dtype=torch.uint8, device="cpu")
    return [comm.execute(Broadcast(data, root))]


def _alltoall(comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
    """Exchange byte messages, padded to the longest; return the received rows and int32 counts by sender."""
    splits, tensor = decision.sizes, operations[0].inputs[0]  # [sender][receiver]
    row_bytes = _row_bytes(tensor)
    data = as_bytes(tensor)
    messages = data.new_zeros(comm.size, max(map(max, splits)) * row_bytes)
    lengths = [count * row_bytes for count in splits[comm.rank]]
    for message, chunk in zip(messages, data[: sum(lengths)].split(lengths), strict=True):
        message[: chunk.numel()] = chunk
    received = comm.execute(AllToAll(messages))
    counts = [sender[comm.rank] for sender in splits]
    chunks = [message[: count * row_bytes] for message, count in zip(received, counts, strict=True)]
    output = from_bytes(torch.cat(chunks), tensor.dtype, (sum(counts), *tensor.shape[1:]))
    return [output, torch.tensor(counts, dtype=torch.int32, device="cpu")]


def _no_transfer(comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
    """Return no results: a barrier and the end of a join consist of the negotiation alone."""
    return []


Action = Callable[[Communicator, Decision, list[Pending]], list[Tensor]]
ACTIONS: dict[str, Action] = {
    "allreduce": _allreduce, "adasum": _adasum, "allgather": _allgather, "broadcast": _broadcast,
    "broadcast_object": _broadcast_object, "alltoall": _alltoall, "reducescatter": _reducescatter,
    "barrier": _no_transfer, "join": _no_transfer,
}  # fmt: skip


def _clone(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _row_bytes(tensor: Tensor) -> int:
    """Return the size in bytes of one row, an element along the first dimension."""
    return tensor.element_size() * math.prod(tensor.shape[1:])
