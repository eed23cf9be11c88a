"""Collectives that a policy may request. A communicator of any backend answers them.

Rules:

1. The answer to each request is one tensor.
2. The flow gives the tensor of a request away: the communicator may reduce into it and return it. The same holds for
   ``out``, an optional output buffer. The communicator may ignore ``out``, and uses it only if the answer fits exactly.
3. ``group`` names the ranks that take part: ``"world"`` (the synchronizer's ranks), ``"node"`` (the ranks on this
   host), ``"cross"`` (the ranks with this local rank on all hosts), or a name that was given to the communicator.
   ``"ranks:0,1|2,3"`` divides all ranks into groups, and names the one that has this rank.
   A wrapper may change the group of its inner policy's requests with :func:`dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdbridge.errors import Unsupported

REDUCTIONS = ("sum", "product", "min", "max")


def groups_of(name: str) -> list[list[int]]:
    """Return the groups of a name ``"ranks:..."`` (rule 3); none for other names.

    >>> groups_of("ranks:0,1|2,3"), groups_of("node")
    ([[0, 1], [2, 3]], [])
    """
    prefix, _, groups = name.partition(":")
    return [[int(rank) for rank in group.split(",")] for group in groups.split("|")] if prefix == "ranks" else []


@dataclass(frozen=True, eq=False)
class Collective:
    """Base of all requests. Shapes below are those of ``tensor``; N is the size of ``group``.

    Attributes:
        tensor: this rank's part of the message.
    """

    tensor: Tensor

    @property
    def group(self) -> str:
        """Name of the group of ranks that take part (rule 3)."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """Name of the collective, as in ``AllReduce``."""
        return type(self).__name__

    def signature(self) -> str:
        """Return a short text that must be equal on all ranks of the group.

        >>> AllReduce(torch.zeros(2, 3)).signature()
        'AllReduce[2, 3] float32 op=sum group=world'

        Groups of the same name may differ in size, so their first dimension is not compared:

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
        """Return the shape of the answer in a group of ``size`` ranks.

        >>> AllGather(torch.zeros(3)).answer_shape(4), ReduceScatter(torch.zeros(4, 3)).answer_shape(4)
        ((4, 3), (3,))
        """
        return tuple(self.tensor.shape)

    def bytes_sent(self, size: int) -> int:
        """Return the bytes that one rank sends in a bandwidth-optimal schedule among ``size`` ranks, rounded down.

        AllReduce sends ``2 (N-1)/N`` of its tensor (ring; Patarasu and Yuan 2009), AllToAll,
        ReduceScatter and Broadcast ``(N-1)/N``, AllGather ``N-1`` times its tensor.

        >>> AllReduce(torch.zeros(1000)).bytes_sent(2), AllGather(torch.zeros(1000)).bytes_sent(4)
        (4000, 12000)
        """
        nbytes = self.tensor.numel() * self.tensor.element_size() * (size - 1)
        return self._share(nbytes, size)

    def _share(self, nbytes: int, size: int) -> int:
        """Bytes that one rank sends, where ``nbytes`` is N-1 times the size of the tensor."""
        return nbytes // size


def _check_op(op: str, tensor: Tensor) -> None:
    """Raise Unsupported unless ``op`` is a reduction that is defined for the tensor's dtype."""
    if op not in REDUCTIONS:
        raise Unsupported(f"op={op!r} is not a reduction; use one of {', '.join(REDUCTIONS)}")
    if tensor.dtype == torch.bool and op not in ("min", "max"):
        raise Unsupported(f"op={op!r} has no meaning for bool tensors; use 'max' (any) or 'min' (all)")


def _check_rows(kind: str, tensor: Tensor) -> None:
    """Raise Unsupported if ``tensor`` has no first dimension."""
    if tensor.dim() == 0:
        raise Unsupported(f"{kind} needs a tensor of shape [size, ...], one row per rank; got a scalar")


@dataclass(frozen=True, eq=False)
class AllReduce(Collective):
    """Element-wise ``op`` over ranks. Answer: shape and dtype of ``tensor``, the same bits on all ranks.

    Attributes:
        tensor: this rank's term.
        op: "sum", "product", "min" or "max".
        group: name of the group of ranks that take part.
    """

    op: str = "sum"
    group: str = "world"

    def __post_init__(self) -> None:
        _check_op(self.op, self.tensor)

    def _share(self, nbytes: int, size: int) -> int:
        return 2 * nbytes // size


@dataclass(frozen=True, eq=False)
class AllGather(Collective):
    """Every rank's tensor, all of one shape. Answer: the tensors stacked in rank order, ``[N, *shape]``.

    Attributes:
        tensor: this rank's part.
        group: name of the group of ranks that take part.
        out: memory for the answer, which the backend uses if shape and dtype fit; None: new memory.
    """

    group: str = "world"
    out: Tensor | None = None

    def answer_shape(self, size: int) -> tuple[int, ...]:
        return (size, *self.tensor.shape)

    def _share(self, nbytes: int, size: int) -> int:
        return nbytes


@dataclass(frozen=True, eq=False)
class AllToAll(Collective):
    """Row i of ``tensor``, ``[N, ...]``, goes to rank i. Answer: ``[N, ...]``, where row i came from rank i.

    Attributes:
        tensor: one row per rank of the group.
        group: name of the group of ranks that take part.
        out: memory for the answer, which the backend uses if shape and dtype fit; None: new memory.
    """

    group: str = "world"
    out: Tensor | None = None

    def __post_init__(self) -> None:
        _check_rows("AllToAll", self.tensor)


@dataclass(frozen=True, eq=False)
class ReduceScatter(Collective):
    """Element-wise ``op`` over ranks of ``tensor``, ``[N, ...]``. Answer: ``[...]``, this rank's row of the result.

    Attributes:
        tensor: one row per rank of the group.
        op: "sum", "product", "min" or "max".
        group: name of the group of ranks that take part.
    """

    op: str = "sum"
    group: str = "world"

    def __post_init__(self) -> None:
        _check_op(self.op, self.tensor)
        _check_rows("ReduceScatter", self.tensor)

    def answer_shape(self, size: int) -> tuple[int, ...]:
        return tuple(self.tensor.shape[1:])


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """The tensor of rank ``root``, counted in the group. Answer: shape and dtype of ``tensor``, on all ranks.

    Attributes:
        tensor: the value on rank ``root``; elsewhere only its shape and dtype count.
        root: rank within the group that sends.
        group: name of the group of ranks that take part.
    """

    root: int = 0
    group: str = "world"


def output_of(request: AllGather | AllToAll, numel: int) -> Tensor | None:
    """Return ``request.out``, flat, if an answer of ``numel`` elements fits exactly; else None."""
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
    """Run ``flow``, and the generator ``answer(request)`` for each of its requests. Yields what the answers yield.

    Returns what the flow returns, or its first request of the type ``until``. An error in an answer is thrown into
    ``flow``, so that the traceback shows the line of the request. This generator keeps no reference to a message once
    the flow has continued, so that its memory can be reused.
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
    """Record that the current CUDA stream uses ``tensor``: its memory is not reused while the stream reads it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
