"""The base of all communicators: it brings tensors into the form that a library takes, and does what a library cannot.

Rules:

1. A library sees flat, contiguous, non-empty tensors without gradient, and only among two or more ranks.
2. It moves bytes (gather, exchange, broadcast: any dtype) and reduces what :meth:`Bridged._reduces` allows.
3. What it does not reduce is exchanged in shards, reduced by the owner in rank order (16-bit floats in float32,
   rounded once) and gathered: as many bytes as a ring all-reduce, and equal bits on all ranks by construction.
   That is also how minima and maxima of floats travel: libraries lose NaN in them, ``torch.minimum`` does not.
4. The in-place path (``AllReduce`` of what the library reduces) copies nothing.
5. CUDA tensors that the library cannot take pass through pinned host memory both ways, here and nowhere else. Torch
   keeps such memory and hands it out again.
6. What a library raises becomes :class:`CollectiveTimeout` or :class:`RankFailed` here, with this rank and the cause.
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

PIECE = 1 << 30
"""Bytes that a library is handed at once: their counts are often 32-bit integers."""

SMALL = 4096
"""Up to this many bytes, one gather that everyone reduces (one round) replaces an exchange and a gather (two)."""

TIMEOUTS = ("timed out", "timeout")
LOSSES = ("connection", "peer", "broken pipe", "shut down", "socket", "remote", "aborted", "proc_failed")
"""Words by which libraries say why an operation failed."""

STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda total, row: total.add_(row),
    "product": lambda total, row: total.mul_(row),
    "min": lambda total, row: torch.minimum(total, row, out=total),
    "max": lambda total, row: torch.maximum(total, row, out=total),
}


def fold(rows: Tensor, op: str) -> Tensor:
    """Reduce ``rows[0], rows[1], ...`` in this order; 16-bit floats are added in float32 and rounded once.

    >>> fold(torch.tensor([[256.0, 1], [1.0, 1], [1.0, 1]], dtype=torch.bfloat16), "sum")
    tensor([258.,   3.], dtype=torch.bfloat16)
    """
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    total = rows[0].to(wide)
    for row in rows[1:]:
        STEPS[op](total, row)
    return total.to(rows.dtype)


class Bridged(Communicator):
    """A communicator over a library. A backend implements only the methods at the end of this class."""

    failures: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)
    reduced_dtypes: ClassVar[Collection[torch.dtype]] = ()  # that it adds and multiplies rightly
    piece: int = PIECE
    reduced_piece: ClassVar[int] = PIECE  # bytes that it reduces best at once

    def __init__(self, name: str, rank: int, size: int, timeout_seconds: float, watch: Watch = unwatched) -> None:
        super().__init__(watch)
        self.name = name  # equal on all ranks, unique in the process
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.alone = size == 1  # the library is not called
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
                    return fold(rows, op).view(shape)
                case Broadcast(root=root):
                    return (yield from self._broadcast(tensor.contiguous(), root))
        except HvdbridgeError:
            raise
        except self.failures as cause:
            explained = self._explained(request, cause)
            if explained is None:
                raise
            try:
                with self.watch(request):  # the monitor may replace it by the job's first cause
                    raise cause
            except HvdbridgeError:
                raise
            except self.failures:
                raise explained from cause
        raise Unsupported(f"{request.kind} is not a collective that communicators know")

    def _check(self, request: Collective) -> None:
        """Refuse what has no meaning, before any rank sends anything."""
        t, wrong = request.tensor, None
        if t.layout != torch.strided or t.is_quantized:
            wrong = f"only dense tensors travel; got layout {t.layout}. Call .to_dense() first"
        elif t.device.type not in ("cpu", "cuda"):
            wrong = f"only CPU and CUDA tensors travel; got one on {t.device}"
        elif isinstance(request, (AllReduce, ReduceScatter)) and t.dtype not in DTYPES:
            wrong = f"{t.dtype} is not reduced. Use one of {', '.join(map(str, DTYPES))}"
        elif isinstance(request, (AllToAll, ReduceScatter)) and t.shape[0] != self.size:
            wrong = f"one row for each of {self.size} ranks is needed, got {t.shape[0]} rows"
        elif isinstance(request, Broadcast) and not 0 <= request.root < self.size:
            wrong = f"root {request.root} is not a rank of this group of {self.size}"
        if wrong is not None:
            raise Unsupported(f"rank {self.rank}: {request.signature()}: {wrong}")

    def _through_host(self, request: Collective) -> Answer:
        tensor = request.tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        answer = yield from self._answer(replace(request, tensor=host))
        return answer.to(tensor.device)

    def _explained(self, request: Collective, cause: Exception) -> HvdbridgeError | None:
        """The error for a library's failure, by its text: the libraries have no types for it. None: unknown text."""
        text, what = str(cause), f"rank {self.rank}: {request.signature()}"
        if any(word in text.lower() for word in TIMEOUTS):
            return CollectiveTimeout(f"{what} took longer than its limit: some rank did not come to it. {text}")
        if any(word in text.lower() for word in LOSSES):
            return RankFailed(f"{what} failed: another rank, or the link to it, is gone. {text}")
        return None

    # -- bridges -----------------------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op: str) -> Answer:
        if self.alone or not tensor.numel():
            return tensor
        flat = _flat(tensor)
        if self._reduces(flat, op):
            limit = min(self.piece, self.reduced_piece)
            parts: Sequence[Tensor] = [flat] if flat.nbytes <= limit else flat.split(limit // flat.element_size())
            for part in parts:
                yield from _run(self._reduce_in_place, part, op, last=part is parts[-1])
                self._reduced(part)
            return tensor
        if flat.nbytes <= SMALL:
            return fold((yield from self._gather(flat)), op).view(tensor.shape)
        share = -(-flat.numel() // self.size)
        if share * self.size != flat.numel():  # the sums of the padding are dropped
            flat = torch.cat([flat, flat.new_zeros(share * self.size - flat.numel())])
        rows = flat.view(self.size, share)
        mine = fold((yield from self._exchange(rows, last=False)), op)
        yield from self._gather(mine, rows)  # reuses the exchanged rows: allocating costs more than filling them
        return flat[: tensor.numel()].view(tensor.shape)

    def _gather(self, flat: Tensor, answer: Tensor | None = None) -> Answer:
        if self.alone or not flat.numel():
            return flat.expand(self.size, -1)
        if answer is None:
            answer = flat.new_empty(self.size, flat.numel(), pin_memory=flat.is_pinned())
        answer = answer.view(self.size, -1)
        yield from self._in_pieces(self._all_gather, flat, answer, last=True)
        return answer

    def _exchange(self, rows: Tensor, answer: Tensor | None = None, last: bool = True) -> Answer:
        if self.alone or not rows.numel():
            return rows
        answer = torch.empty_like(rows, pin_memory=rows.is_pinned()) if answer is None else answer.view_as(rows)
        yield from self._in_pieces(self._all_to_all, rows, answer, last)
        return answer

    def _in_pieces(self, move: Callable[[Tensor, Tensor], Work], data: Tensor, answer: Tensor, last: bool) -> Steps:
        """``move(data, answer)`` as bytes, along the last axis, in pieces that 32-bit counts can take."""
        data, answer = data.view(torch.uint8), answer.view(torch.uint8)
        width, step = data.shape[-1], max(self.piece // self.size, 1)
        if width <= step:
            yield from _run(move, data, answer, last=last)
            return
        for start in range(0, width, step):
            theirs = answer[:, start : start + step].contiguous()
            piece = data[..., start : start + step].contiguous()
            yield from _run(move, piece, theirs, last=last and start + step >= width)
            answer[:, start : start + step] = theirs

    def _broadcast(self, tensor: Tensor, root: int) -> Answer:
        if not self.alone:
            parts = _flat(tensor).view(torch.uint8).split(self.piece)
            for part in parts if tensor.numel() else ():
                yield from _run(self._send_to_all, part, root, last=part is parts[-1])
        return tensor

    # -- groups ------------------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        wanted = [sorted(group) for group in groups]
        ranks = [rank for group in wanted for rank in group]
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ConfigurationError(f"groups {wanted} must be disjoint and hold ranks below {self.size}")
        self._children += 1
        mine = next((i for i, group in enumerate(wanted) if self.rank in group), None)
        name = f"{self.name}.{self._children}"
        with self.watch(f"the opening of {name}"):
            child = self._split(name, wanted, mine)
        if child is not None and mine is not None and self.nodes:
            child.set_nodes([self.nodes[rank] for rank in wanted[mine]])
        return child

    def control(self) -> Communicator:
        made = self.split([range(self.size)])
        assert made is not None, "every rank is in the group of all"
        return made

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for group in self.groups.values():
                group.close()
            self._close()

    # -- what a backend writes ---------------------------------------------------------------------------

    def _reduces(self, flat: Tensor, op: str) -> bool:
        """Whether the library reduces such a tensor rightly, NaN and overflow included."""
        loses_nan = flat.is_floating_point() and op in ("min", "max")
        return flat.dtype in self.reduced_dtypes and not loses_nan

    @abstractmethod
    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        """Start to reduce ``flat`` over ranks, in place."""

    def _reduced(self, flat: Tensor) -> None:
        """Correct a reduced ``flat`` in place."""

    @abstractmethod
    def _all_gather(self, data: Tensor, answer: Tensor) -> Work:
        """Start to gather bytes ``[n]`` of each rank into ``answer``, contiguous ``[size, n]``."""

    @abstractmethod
    def _all_to_all(self, rows: Tensor, answer: Tensor) -> Work:
        """Start to exchange bytes ``[size, n]``, contiguous: row i goes to rank i; what it sent into ``answer[i]``."""

    @abstractmethod
    def _send_to_all(self, data: Tensor, root: int) -> Work:
        """Start to fill ``data`` (bytes) with what rank ``root`` has in it."""

    @abstractmethod
    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        """The communicator of ``groups[mine]``; called by all ranks, those in no group (None) included."""

    @abstractmethod
    def _close(self) -> None:
        """Free what the library holds for this communicator."""


def _run(start: Callable[..., Work], *args: object, last: bool = False) -> Steps:
    """One operation, in steps; ``last``: of its request."""
    yield None
    work = start(*args)
    work.last = last
    yield work
    work.wait()


def _flat(tensor: Tensor) -> Tensor:
    """All elements in one row with stride 1, which ``view(-1)`` of a single element need not have."""
    if tensor.stride() == (1,):
        return tensor
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))
