"""The base class of communicators: it converts tensors for a library and computes what the library does not support.

Rules:

1. The library receives flat, contiguous, non-empty tensors without gradient, and only in groups of two or more ranks.
2. The library moves bytes (gather, exchange, broadcast: any dtype) and reduces what :meth:`Bridged._reduces` allows.
3. Other reductions exchange shards (small ones whole tensors: :data:`ONE_ROUND_BYTES`). The owner of a shard reduces it
   in rank order (16-bit floats in float32, rounded once), then the shards are gathered. A rank sends as many bytes as
   in a ring all-reduce, and the result is computed once, so its bits are equal on all ranks. Minima and maxima of
   floats also take this path: libraries lose NaN in them, ``torch.minimum`` does not.
4. The in-place path (``AllReduce`` that the library reduces) copies no contiguous tensor.
5. CUDA tensors that the library does not take are copied to pinned host memory, and the result back to the GPU.
   :meth:`Bridged._through_host` alone does this. Torch caches pinned memory, so its allocation is cheap.
6. Timeouts and lost peers that a library reports become :class:`CollectiveTimeout` or :class:`RankFailed` here, with
   this rank and the cause. Its other errors are raised unchanged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.backends.communicator import DTYPES, Answer, Communicator, Watch, Work, unwatched
from hvdbridge.errors import (
    CollectiveTimeout,
    ConfigurationError,
    HvdbridgeError,
    NotInitialized,
    RankFailed,
    Unsupported,
)
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter, output_of

Steps = Generator[Work | None, None, None]

MAX_OPERATION_BYTES = 1 << 30
"""Maximum size, in bytes, of one operation of a library. Libraries often count elements in 32-bit integers."""

ONE_ROUND_BYTES = 4096
"""Up to this many bytes, all ranks gather and reduce the whole tensor (one round) instead of shards (two rounds)."""

TIMEOUT_WORDS = ("timed out", "timeout")
LOSS_WORDS = ("connection", "peer", "broken pipe", "shut down", "socket", "remote", "aborted", "proc_failed")
"""Words by which libraries describe the cause of a failure in the text of their errors."""

REDUCERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda total, row: total.add_(row),
    "product": lambda total, row: total.mul_(row),
    "min": lambda total, row: torch.minimum(total, row, out=total),
    "max": lambda total, row: torch.maximum(total, row, out=total),
}


def reduce_rows(rows: Tensor, op: str) -> Tensor:
    """Reduce ``rows``, of shape ``[N, n]``, over the first axis in index order.

    16-bit floats are accumulated in float32 and rounded once. Other dtypes are accumulated in ``rows[0]``.

    >>> reduce_rows(torch.tensor([[256.0, 1], [1.0, 1], [1.0, 1]], dtype=torch.bfloat16), "sum")
    tensor([258.,   3.], dtype=torch.bfloat16)
    """
    accumulation_dtype = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    total = rows[0].to(accumulation_dtype)
    for row in rows[1:]:
        REDUCERS[op](total, row)
    return total.to(rows.dtype)


class Bridged(Communicator):
    """A communicator over a library. A backend implements the abstract methods at the end of this class, and
    ``world()``.

    Attributes:
        failures: exception types that the library raises when an operation fails.
        reduced_dtypes: dtypes that the library adds and multiplies correctly.
        max_operation_bytes: maximum size of one operation, in bytes.
        max_reduction_bytes: maximum size of one reduction, in bytes, for best speed.
        name: equal on all ranks of the communicator; tells the communicators of a process apart.
        local_only: the group has one rank and the library is not called.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)
    reduced_dtypes: ClassVar[Collection[torch.dtype]] = ()
    max_operation_bytes: int = MAX_OPERATION_BYTES
    max_reduction_bytes: ClassVar[int] = MAX_OPERATION_BYTES

    def __init__(self, name: str, rank: int, size: int, timeout_seconds: float, watch: Watch = unwatched) -> None:
        super().__init__(watch)
        self.name = name
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.local_only = size == 1
        self.closed = False
        self._children = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.size})"

    # -- requests ----------------------------------------------------------------------------------------

    def _answer(self, request: Collective) -> Answer:
        if self.closed:
            raise NotInitialized(f"rank {self.rank}: {request.signature()} on a communicator that was closed")
        tensor, shape = request.tensor.detach(), request.answer_shape(self.size)
        self._check(request)
        if tensor.is_cuda and not self.capabilities.cuda:
            return (yield from self._through_host(request))
        try:
            match request:
                case AllReduce(op=op):
                    return (yield from self._all_reduce(tensor.contiguous(), op))
                case AllGather():
                    out = output_of(request, self.size * tensor.numel())
                    return (yield from self._gather(_flat(tensor), out)).reshape(shape)
                case AllToAll():
                    out = output_of(request, tensor.numel())
                    return (yield from self._exchange(_flat(tensor).view(self.size, -1), out)).reshape(shape)
                case ReduceScatter(op=op):
                    rows = yield from self._exchange(_flat(tensor).view(self.size, -1))
                    return reduce_rows(rows, op).view(shape)
                case Broadcast(root=root):
                    return (yield from self._broadcast(tensor.contiguous(), root))
        except HvdbridgeError:
            raise
        except self.failures as cause:
            translated = self._translate_error(request, cause)
            if translated is None:
                raise
            try:
                with self.watch(request):  # the monitor may replace the error by the first cause of the job's failure
                    raise cause
            except HvdbridgeError:
                raise
            except self.failures:
                raise translated from cause
        raise Unsupported(f"{request.kind} is not a collective that communicators know")

    def _check(self, request: Collective) -> None:
        """Raise Unsupported for a request that cannot be executed, before this rank sends data."""
        t, problem = request.tensor, None
        if t.layout != torch.strided or t.is_quantized:
            problem = f"only dense tensors travel; got layout {t.layout}. Call .to_dense() first"
        elif t.device.type not in ("cpu", "cuda"):
            problem = f"only CPU and CUDA tensors travel; got one on {t.device}"
        elif isinstance(request, (AllReduce, ReduceScatter)) and t.dtype not in DTYPES:
            problem = f"{t.dtype} is not reduced. Use one of {', '.join(map(str, DTYPES))}"
        elif isinstance(request, (AllToAll, ReduceScatter)) and t.shape[0] != self.size:
            problem = f"one row for each of {self.size} ranks is needed, got {t.shape[0]} rows"
        elif isinstance(request, Broadcast) and not 0 <= request.root < self.size:
            problem = f"root {request.root} is not a rank of this group of {self.size}"
        if problem is not None:
            raise Unsupported(f"rank {self.rank}: {request.signature()}: {problem}")

    def _through_host(self, request: Collective) -> Answer:
        """Execute a request for a CUDA tensor on a copy in pinned host memory."""
        tensor = request.tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        result = yield from self._answer(replace(request, tensor=host))
        return result.to(tensor.device)

    def _translate_error(self, request: Collective, cause: Exception) -> HvdbridgeError | None:
        """Return the error that stands for ``cause``, by its text, since libraries have no types; None: unknown."""
        text, prefix = str(cause), f"rank {self.rank}: {request.signature()}"
        if any(word in text.lower() for word in TIMEOUT_WORDS):
            return CollectiveTimeout(f"{prefix} took longer than its limit: some rank did not come to it. {text}")
        if any(word in text.lower() for word in LOSS_WORDS):
            return RankFailed(f"{prefix} failed: another rank, or the link to it, is gone. {text}")
        return None

    # -- collectives -------------------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op: str) -> Answer:
        if self.local_only or not tensor.numel():
            return tensor
        flat = _flat(tensor)
        if self._reduces(flat, op):
            limit = min(self.max_operation_bytes, self.max_reduction_bytes)
            chunks: Sequence[Tensor] = [flat] if flat.nbytes <= limit else flat.split(limit // flat.element_size())
            for chunk in chunks:
                yield from _run(self._reduce_in_place, chunk, op, last=chunk is chunks[-1])
                self._after_reduce(chunk)
            return tensor
        if flat.nbytes <= ONE_ROUND_BYTES:
            return reduce_rows((yield from self._gather(flat)), op).view(tensor.shape)
        shard_numel = -(-flat.numel() // self.size)
        if shard_numel * self.size != flat.numel():  # pad; the results of the padding are dropped below
            flat = torch.cat([flat, flat.new_zeros(shard_numel * self.size - flat.numel())])
        rows = flat.view(self.size, shard_numel)
        mine = reduce_rows((yield from self._exchange(rows, last=False)), op)
        yield from self._gather(mine, rows)  # into the rows that were sent, since allocation is slow
        return flat[: tensor.numel()].view(tensor.shape)

    def _gather(self, flat: Tensor, output: Tensor | None = None) -> Answer:
        """Gather ``flat``, of ``n`` elements, from each rank; return ``[size, n]``, in ``output`` if it is given and
        anything is sent."""
        if self.local_only or not flat.numel():
            return flat.expand(self.size, -1)
        if output is None:
            output = flat.new_empty(self.size, flat.numel(), pin_memory=flat.is_pinned())
        output = output.view(self.size, -1)
        yield from self._in_chunks(self._all_gather, flat, output, last=True)
        return output

    def _exchange(self, rows: Tensor, output: Tensor | None = None, last: bool = True) -> Answer:
        """Send ``rows[i]`` to rank i; return the rows received, in rank order, in ``output`` if it is given and
        anything is sent."""
        if self.local_only or not rows.numel():
            return rows
        output = torch.empty_like(rows, pin_memory=rows.is_pinned()) if output is None else output.view_as(rows)
        yield from self._in_chunks(self._all_to_all, rows, output, last)
        return output

    def _in_chunks(self, issue: Callable[[Tensor, Tensor], Work], data: Tensor, output: Tensor, last: bool) -> Steps:
        """Run ``issue(data, output)`` on bytes, in chunks of the last axis that 32-bit counts can express."""
        data, output = data.view(torch.uint8), output.view(torch.uint8)
        width, step = data.shape[-1], max(self.max_operation_bytes // self.size, 1)
        if width <= step:
            yield from _run(issue, data, output, last=last)
            return
        for start in range(0, width, step):
            received = output[:, start : start + step].contiguous()
            chunk = data[..., start : start + step].contiguous()
            yield from _run(issue, chunk, received, last=last and start + step >= width)
            output[:, start : start + step] = received

    def _broadcast(self, tensor: Tensor, root: int) -> Answer:
        if not self.local_only:
            chunks = _flat(tensor).view(torch.uint8).split(self.max_operation_bytes)
            for chunk in chunks if tensor.numel() else ():
                yield from _run(self._send_to_all, chunk, root, last=chunk is chunks[-1])
        return tensor

    # -- groups ------------------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        sorted_groups = [sorted(group) for group in groups]
        ranks = [rank for group in sorted_groups for rank in group]
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ConfigurationError(f"groups {sorted_groups} must be disjoint and hold ranks below {self.size}")
        self._children += 1
        mine = next((i for i, group in enumerate(sorted_groups) if self.rank in group), None)
        name = f"{self.name}.{self._children}"
        with self.watch(f"the opening of {name}"):
            child = self._split(name, sorted_groups, mine)
        if child is not None and mine is not None and self.nodes:
            child.set_nodes([self.nodes[rank] for rank in sorted_groups[mine]])
        return child

    def control(self) -> Communicator:
        duplicate = self.split([range(self.size)])
        assert duplicate is not None, "every rank is in the group of all"
        return duplicate

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for group in self.groups.values():
                group.close()
            self._close()

    # -- implemented by backends -------------------------------------------------------------------------

    def _reduces(self, flat: Tensor, op: str) -> bool:
        """Return whether the library reduces a tensor such as ``flat`` correctly, NaN and overflow included."""
        loses_nan = flat.is_floating_point() and op in ("min", "max")
        return flat.dtype in self.reduced_dtypes and not loses_nan

    @abstractmethod
    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        """Start to reduce ``flat``, of shape ``[n]``, over the ranks, in place."""

    def _after_reduce(self, flat: Tensor) -> None:
        """Correct the reduced ``flat`` in place, after the operation is complete."""

    @abstractmethod
    def _all_gather(self, data: Tensor, output: Tensor) -> Work:
        """Start to gather uint8 ``data``, ``[n]``, of each rank into ``output``, ``[size, n]`` and contiguous."""

    @abstractmethod
    def _all_to_all(self, rows: Tensor, output: Tensor) -> Work:
        """Start to send ``rows[i]`` to rank i and to receive ``output[i]`` from it; both uint8 ``[size, n]``."""

    @abstractmethod
    def _send_to_all(self, data: Tensor, root: int) -> Work:
        """Start to broadcast rank ``root``'s ``data``, uint8 ``[n]``, into ``data`` of all ranks."""

    @abstractmethod
    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        """Return the communicator of ``groups[mine]``. All ranks call it; ``mine`` is None for a rank in no group."""

    @abstractmethod
    def _close(self) -> None:
        """Free the library's resources for this communicator."""


def _run(start: Callable[..., Work], *args: object, last: bool = False) -> Steps:
    """Run one operation in steps; ``last``: no other operation of its request follows."""
    yield None
    work = start(*args)
    work.last = last
    yield work
    work.wait()


def _flat(tensor: Tensor) -> Tensor:
    """Return a 1-D view or copy with stride 1; ``view(-1)`` of a single element may have another stride."""
    if tensor.stride() == (1,):
        return tensor
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))
