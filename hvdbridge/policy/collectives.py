"""Requests: what a policy may ask of the other ranks, whatever communicator answers.

Rules:

1. One request, one tensor back.
2. The tensor of a request is given away: the communicator may reduce into it and return it. So is ``out``, memory
   for the answer, which need not be used: only where the answer fits there exactly may it stand there.
3. ``group`` names the ranks that take part: ``"world"`` (the synchronizer's ranks), ``"node"`` (those on this
   host), ``"cross"`` (the same local rank on every host), a division of all ranks, ``"ranks:0,1|2,3"``, of which this
   rank's part is meant, or a name that the communicator was given.
   A wrapper may re-label the requests of its inner policy with :func:`dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdbridge.errors import Unsupported

OPS = ("sum", "product", "min", "max")


@dataclass(frozen=True, eq=False)
class Collective:
    """Base of all requests. Shapes below are those of ``tensor``; N is the size of ``group``."""

    tensor: Tensor

    @property
    def group(self) -> str:
        raise NotImplementedError

    @property
    def kind(self) -> str:
        return type(self).__name__

    def signature(self) -> str:
        """What must be equal on all ranks of the group, as one short text.

        >>> AllReduce(torch.zeros(2, 3)).signature()
        'AllReduce[2, 3] float32 op=sum group=world'

        Groups of one name may differ in size, so the rows for their ranks are not counted:

        >>> AllToAll(torch.zeros(2, 3), group="cross").signature()
        'AllToAll[N, 3] float32 group=cross'
        """
        t, shape = self.tensor, [str(n) for n in self.tensor.shape]
        if isinstance(self, AllToAll | ReduceScatter) and self.group != "world":
            shape[0] = "N"
        extra = "".join(f" {k}={getattr(self, k)}" for k in ("op", "root") if hasattr(self, k))
        return f"{self.kind}[{', '.join(shape)}] {str(t.dtype).removeprefix('torch.')}{extra} group={self.group}"

    __str__ = signature

    def answer_shape(self, size: int) -> tuple[int, ...]:
        """The shape of the answer among ``size`` ranks.

        >>> AllGather(torch.zeros(3)).answer_shape(4), ReduceScatter(torch.zeros(4, 3)).answer_shape(4)
        ((4, 3), (3,))
        """
        return tuple(self.tensor.shape)

    def bytes_sent(self, size: int) -> int:
        """Bytes that one rank sends in a bandwidth-optimal schedule among ``size`` ranks, rounded down.

        AllReduce sends ``2 (N-1)/N`` of its tensor (ring; Patarasu and Yuan 2009), AllToAll,
        ReduceScatter and Broadcast ``(N-1)/N``, AllGather ``N-1`` times its tensor.

        >>> AllReduce(torch.zeros(1000)).bytes_sent(2), AllGather(torch.zeros(1000)).bytes_sent(4)
        (4000, 12000)
        """
        whole = self.tensor.numel() * self.tensor.element_size() * (size - 1)
        return self._share(whole, size)

    def _share(self, whole: int, size: int) -> int:
        return whole // size


def _check_op(op: str, tensor: Tensor) -> None:
    if op not in OPS:
        raise Unsupported(f"op={op!r} is not a reduction; use one of {', '.join(OPS)}")
    if tensor.dtype == torch.bool and op not in ("min", "max"):
        raise Unsupported(f"op={op!r} has no meaning for bool tensors; use 'max' (any) or 'min' (all)")


def _check_rows(kind: str, tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise Unsupported(f"{kind} needs a tensor of shape [size, ...], one row per rank; got a scalar")


@dataclass(frozen=True, eq=False)
class AllReduce(Collective):
    """Element-wise ``op`` over ranks. Answer: shape and dtype of ``tensor``, equal bits on all ranks."""

    op: str = "sum"
    group: str = "world"

    def __post_init__(self) -> None:
        _check_op(self.op, self.tensor)

    def _share(self, whole: int, size: int) -> int:
        return 2 * whole // size


@dataclass(frozen=True, eq=False)
class AllGather(Collective):
    """Every rank's tensor (same shape everywhere). Answer: stacked in rank order, ``[N, *shape]``."""

    group: str = "world"
    out: Tensor | None = None

    def answer_shape(self, size: int) -> tuple[int, ...]:
        return (size, *self.tensor.shape)

    def _share(self, whole: int, size: int) -> int:
        return whole


@dataclass(frozen=True, eq=False)
class AllToAll(Collective):
    """``tensor`` is ``[N, ...]``, row i goes to rank i. Answer: ``[N, ...]``, row i came from rank i."""

    group: str = "world"
    out: Tensor | None = None

    def __post_init__(self) -> None:
        _check_rows("AllToAll", self.tensor)


@dataclass(frozen=True, eq=False)
class ReduceScatter(Collective):
    """``tensor`` is ``[N, ...]``. Answer ``[...]``: row ``rank`` of the element-wise ``op`` over ranks."""

    op: str = "sum"
    group: str = "world"

    def __post_init__(self) -> None:
        _check_op(self.op, self.tensor)
        _check_rows("ReduceScatter", self.tensor)

    def answer_shape(self, size: int) -> tuple[int, ...]:
        return tuple(self.tensor.shape[1:])


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """The tensor of rank ``root`` (a rank of the group). Answer: its shape and dtype, on all ranks."""

    root: int = 0
    group: str = "world"


def output_of(request: AllGather | AllToAll, numel: int) -> Tensor | None:
    """``request.out``, flat, if it is memory for an answer of ``numel`` elements."""
    out, like = request.out, request.tensor
    if out is None or (out.dtype, out.device, out.numel()) != (like.dtype, like.device, numel):
        return None
    return out.view(-1) if out.is_contiguous() else None


T = TypeVar("T")


def relay(
    flow: Generator[Collective, Tensor, T],
    answer: Callable[[Collective], Generator[Any, Any, Tensor]],
    until: type | tuple[()] = (),
) -> Any:
    """``flow`` with ``answer(request)`` in the place of each request: a generator of what the answers yield.

    It ends with the flow, or with a request of the type ``until``, and returns that. An error of an answer is thrown
    into ``flow``, so the traceback shows the line that asked. Neither a request nor an answer is held when the flow has
    gone on: these are messages.
    """
    try:
        request = next(flow)
        while not isinstance(request, until):
            try:
                tensor = yield from answer(request)
            except Exception as error:
                request = flow.throw(error)
            else:
                del request
                request = flow.send(tensor)
                del tensor
    except StopIteration as end:
        return end.value
    return request


def used_here(tensor: Tensor) -> None:
    """Tell CUDA's allocator that the current stream uses memory of another one, so that it is not given out before."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
