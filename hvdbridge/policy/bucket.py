"""Buckets: flat pieces of a model's gradient, addressed by parameter name.

Rules:

1. A bucket arrives raw: rank r's local gradient, not yet weighted.
2. :meth:`Bucket.weighted` multiplies once by the double ``w_r / sum(w)``; called again it does nothing,
   so wrappers compose without scaling twice. The plain sum over ranks is then the weighted mean.
3. A rank of weight 0 contributes nothing, not even its NaN: zeros are written, nothing is multiplied.
4. Everything is keyed by parameter name: bucket boundaries move between steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hvdbridge.deprecated import renamed
from hvdbridge.errors import Unsupported
from hvdbridge.policy.buffer_pool import BufferPool

T = TypeVar("T")


BLOCK = 1024
"""Elements of the block that a sharded scheme never splits between two owners."""


def number_blocks(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Model-wide number of each parameter's first block; every parameter starts a new one.

    >>> number_blocks({"a": (1025,), "b": (3,), "c": (2, 2)})
    {'a': 0, 'b': 2, 'c': 3}
    """
    first: dict[str, int] = {}
    count = 0
    for name, shape in shapes.items():
        first[name] = count
        count += -(-torch.Size(shape).numel() // BLOCK)
    return first


class Layout:
    """The offset of each named parameter in a flat buffer. Immutable but for :meth:`of_model`; compared by identity, so
    cache it.

    Attributes:
        blocks: model-wide number of each parameter's first block of :data:`BLOCK` elements, in the order of
            ``Policy.init``; decides which rank owns which block in sharded schemes. Numbered within the layout if not
            given.
        dtypes: model-wide type of each parameter's gradient as it arrived; a wrapper may have widened the buffer since,
            as joining parameters of several types does. Empty: the buffer's.

    >>> layout = Layout({"weight": (2, 3), "bias": (3,)})
    >>> layout.numel, layout.offsets["bias"]
    (9, 6)
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        blocks: Mapping[str, int] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.names = tuple(self.shapes)
        self.sizes = {name: shape.numel() for name, shape in self.shapes.items()}
        ends = list(accumulate(self.sizes.values(), initial=0))
        self.offsets = dict(zip(self.names, ends, strict=False))
        self.numel = ends[-1]
        self._derived: dict[Hashable, Any] = {}
        self.blocks, self.dtypes = blocks or number_blocks(self.shapes), dtypes or {}

    def of_model(self, blocks: Mapping[str, int], dtypes: Mapping[str, torch.dtype]) -> Layout:
        """Take the whole model's numbers and types, before anything is derived; returns this layout."""
        self.blocks, self.dtypes = blocks, dtypes
        return self

    def derive(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, kept under ``key`` for as long as this layout lives: plans, indices, parts."""
        if key not in self._derived:
            self._derived[key] = make()
        return cast(T, self._derived[key])

    def part(self, names: Iterable[str]) -> Layout:
        """The layout of some of the parameters, in this layout's order; the same object for the same names.

        >>> layout = Layout({"weight": (2, 3), "bias": (3,)})
        >>> layout.part({"bias"}).names, layout.part({"bias", "weight"}) is layout
        (('bias',), True)
        """
        chosen = set(names)
        kept = tuple(name for name in self.names if name in chosen)
        if kept == self.names:
            return self
        shapes = {name: self.shapes[name] for name in kept}
        return self.derive(("part", kept), lambda: Layout(shapes, self.blocks, self.dtypes))

    def finite(self, flat: Tensor) -> Tensor:
        """Whether all of a parameter's elements are finite: bool ``[parameters]``. The host does not wait.

        >>> Layout({"weight": (2,), "none": (0,), "bias": (1,)}).finite(torch.tensor([1.0, math.inf, 2.0]))
        tensor([False,  True,  True])
        """
        starts, ends = self._bounds(flat.device)
        strange = torch.zeros(self.numel + 1, dtype=torch.int32, device=flat.device)  # as many as stand before each
        torch.cumsum(flat - flat != 0, 0, dtype=torch.int32, out=strange[1:])  # inf - inf is NaN
        return strange[ends] == strange[starts]

    def spread(self, flags: Tensor) -> Tensor:
        """Each element has its parameter's flag: bool ``[parameters]`` -> bool ``[numel]``. The host does not wait.

        >>> Layout({"weight": (2,), "none": (0,), "bias": (3,)}).spread(torch.tensor([True, True, False]))
        tensor([ True,  True, False, False, False])
        """
        changes = flags.to(torch.int8)
        changes[1:] -= flags[:-1].to(torch.int8)
        # A GPU's repeat_interleave has one warp for each parameter: of a large one it takes longer than all else
        marks = torch.zeros(self.numel + 1, dtype=torch.int8, device=flags.device)
        marks.index_add_(0, self._bounds(flags.device)[0], changes)
        return torch.cumsum(marks, 0, dtype=torch.int8)[:-1].view(torch.bool)

    def _bounds(self, device: torch.device) -> Tensor:
        """Where each parameter starts and ends: int64 ``[2, parameters]``."""

        def make() -> Tensor:
            bounds = [*self.offsets.values(), self.numel]
            return torch.tensor([bounds[:-1], bounds[1:]], dtype=torch.int64, device=device)

        return self.derive(("bounds", device), make)

    def __repr__(self) -> str:
        return f"Layout({len(self.names)} parameters, {self.numel} elements)"

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return torch.empty(self.numel, dtype=dtype, device=device)


class Views(Mapping[str, Tensor]):
    """A flat tensor as a lazy mapping ``name -> view of the parameter's shape``."""

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        if flat.shape != (layout.numel,):
            raise ValueError(f"{layout!r} needs a flat tensor, got one of shape {list(flat.shape)}")
        self.layout = layout
        self.flat = flat

    def __getitem__(self, name: str) -> Tensor:
        offset = self.layout.offsets[name]
        return self.flat[offset : offset + self.layout.sizes[name]].view(self.layout.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def __repr__(self) -> str:
        return f"Views({self.layout!r}, {self.flat.dtype})"


def flatten(tensors: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """``tensors`` as one flat tensor in the order of ``layout``; no copy where they already are one."""
    if isinstance(tensors, Views) and tensors.layout is layout:
        return tensors.flat
    return torch.cat([tensors[name].reshape(-1) for name in layout.names])


def scale(flat: Tensor, factor: float) -> Tensor:
    """Multiply in place; zeros where the factor is 0, because NaN * 0 is NaN."""
    if factor == 0.0:
        return flat.zero_()
    return flat if factor == 1.0 else flat.mul_(factor)


@dataclass(eq=False)
class WeightingState:
    """Whether what a bucket's flow sends are shares of a mean. One object for a bucket and all copies made of it."""

    weighted: bool = False


@dataclass(frozen=True)
class Ranks:
    """The ranks among which a bucket is aggregated.

    Attributes:
        rank, size: of the synchronizer's group.
        weights: the ranks' weights of this step (doubles), or None if none was set (all equal).
        groups: this rank's number in, and the size of, each named group: ``{"node": (1, 4), ...}``.
        nodes: the node that each rank runs on (any numbers, equal within a node); empty: not known.
    """

    rank: int = 0
    size: int = 1
    weights: tuple[float, ...] | None = None
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()

    def place(self, group: str) -> tuple[int, int]:
        """This rank's number in ``group``, and the group's size.

        Raises:
            Unsupported: it is not known which ranks are in that group.
        """
        if group == "world":
            return self.rank, self.size
        if group not in self.groups:
            known = ", ".join(["world", *sorted(self.groups)])
            raise Unsupported(f"the size of group {group!r} is not known here; known: {known}")
        return self.groups[group]


@dataclass(eq=False)
class Bucket:
    """One flat piece of the gradient and all that a policy may know about it.

    Attributes:
        buffer: flat gradients, ``[layout.numel]``, floating point.
        layout: the offset of each parameter in ``buffer``.
        index: number of the bucket in this step, in canonical order.
        step: number of the synchronizing step, from 0.
        seed: agreed by all ranks; key of shared randomness.
        ranks: the ranks that aggregate it, and their weights.
        needs_sent: whether the caller wants to know what was sent: as :attr:`Aggregated.sent`, with ``buffer`` left as
            it is after :meth:`weighted`, or as :attr:`Aggregated.rest`. Equal on all ranks.
        scaled: whether :meth:`weighted` was done.
        weighting: for a wrapper that gave the bucket away and sees what is sent: whether the copy of it that was made
            or weighted last is weighted.
        last: whether no bucket of this step follows.
        spare: memory like the buffer's whose content is not needed; see :meth:`output`.
        pool: a flow takes memory for messages from it and gives that back. It also takes memory for new state, which
            the state store gives back.
    """

    buffer: Tensor
    layout: Layout
    index: int = 0
    step: int = 0
    seed: int = 0
    ranks: Ranks = Ranks()
    needs_sent: bool = False
    scaled: bool = False
    weighting: WeightingState = field(default_factory=WeightingState)
    last: bool = True
    spare: Tensor | None = None
    pool: BufferPool = field(default_factory=BufferPool)

    def __post_init__(self) -> None:
        self.weighting.weighted = self.scaled

    def __getattr__(self, name: str) -> Any:
        return renamed(self, name, FORMER)

    @property
    def rank(self) -> int:
        """This rank's number in the synchronizer's group."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks in the synchronizer's group."""
        return self.ranks.size

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The ranks' weights of this step, or None if none was set (all equal)."""
        return self.ranks.weights

    def place(self, group: str) -> tuple[int, int]:
        """See :meth:`Ranks.place`."""
        return self.ranks.place(group)

    @property
    def grads(self) -> Views:
        """Lazy mapping from parameter name to a view of its gradient."""
        return Views(self.layout, self.buffer)

    @property
    def weight(self) -> float:
        """This rank's weight as given; 1.0 where none was set."""
        return 1.0 if self.weights is None else self.weights[self.rank]

    @property
    def factor(self) -> float:
        """This rank's share ``w_r / sum(w)``."""
        return 1.0 / self.size if self.weights is None else self.weights[self.rank] / sum(self.weights)

    def weighted(self) -> Bucket:
        """Scale in place by :attr:`factor`, once; returns this bucket.

        >>> bucket = Bucket(torch.ones(3), Layout({"p": (3,)}), ranks=Ranks(1, 2, (3.0, 1.0)))
        >>> bucket.weighted().weighted().buffer
        tensor([0.2500, 0.2500, 0.2500])
        """
        if not self.scaled:
            scale(self.buffer, self.factor)
            self.scaled = True
        self.weighting.weighted = True
        return self

    def output(self, dtype: torch.dtype) -> Tensor:
        """The output buffer: memory for the update, flat, uninitialised. Unless :attr:`needs_sent` it may be that of
        ``buffer``, so a flow asks for it when it reads nothing from there any more.

        >>> bucket = Bucket(torch.ones(3), Layout({"p": (3,)}))
        >>> bucket.output(torch.float32) is bucket.buffer, bucket.output(torch.float64).dtype
        (True, torch.float64)
        """
        own = self.spare if self.needs_sent else self.buffer
        fits = own is not None and own.dtype == dtype and own.numel() == self.layout.numel
        return own if own is not None and fits else self.layout.empty(dtype, self.buffer.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat, uninitialised buffer of the pool, on the bucket's device, which the flow gives back."""
        return self.pool.take(numel, dtype, self.buffer.device)

    def fresh(self, like: Tensor) -> Tensor:
        """Uninitialised memory like a flat tensor, for new state."""
        return self.pool.take(like.numel(), like.dtype, like.device, lasting=True)

    def plus(self, tensors: Mapping[str, Tensor]) -> Bucket:
        """A bucket with ``tensors`` (by name, same shapes) added; the wider of both dtypes."""
        return replace(self, buffer=self.buffer + flatten(tensors, self.layout))

    def with_buffer(self, buffer: Tensor) -> Bucket:
        """The same bucket around another buffer of the same layout."""
        return replace(self, buffer=buffer)


FORMER = {
    "room": "output", "memory": "pool", "rooms": "pool", "mark": "weighting", "groups": "ranks.groups",
    "nodes": "ranks.nodes", "blocks": "layout.blocks", "dtypes": "layout.dtypes",
}  # fmt: skip
"""Attributes of the first edition's buckets, and what to read instead."""
FORMER_ORDER = ("rank", "size", "weights", "needs_sent", "blocks", "groups", "nodes", "scaled", "dtypes")
"""The fields behind ``seed`` in the first edition."""
MOVED_FIELDS = {"rank", "size", "weights", "groups", "nodes", "blocks", "dtypes"}


def _takes_former(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of :class:`Bucket`, which also takes the fields that are in :class:`Ranks` and the layout now, as
    ``dataclasses.replace(bucket, rank=1)`` of the first edition passes them."""

    @wraps(init)
    def accept(self: Bucket, *arguments: Any, **fields: Any) -> None:
        if len(arguments) > 5 and not isinstance(arguments[5], Ranks):
            fields |= dict(zip(FORMER_ORDER, arguments[5:], strict=False))
            arguments = arguments[:5]
        former = {name: fields.pop(name) for name in MOVED_FIELDS & fields.keys()}
        init(self, *arguments, **fields)
        if not former:
            return
        names = ", ".join(sorted(former))
        text = f"Bucket takes {names} in ranks=hvdbridge.policy.bucket.Ranks(...) and Layout(...)"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        if mine := {name: former.pop(name) for name in ("blocks", "dtypes") if name in former}:
            given: dict[str, Any] = {"blocks": self.layout.blocks, "dtypes": self.layout.dtypes}
            self.layout = Layout(self.layout.shapes, **(given | mine))
        self.ranks = replace(self.ranks, **former)

    return accept


Bucket.__init__ = _takes_former(Bucket.__init__)  # type: ignore[method-assign]


def join_layouts(layouts: Iterable[Layout]) -> Layout:
    """One layout of several, one after the other."""
    return Layout({name: shape for layout in layouts for name, shape in layout.shapes.items()})


DDP_MB = 25.0
"""DDP's size of a bucket in MiB."""
FIRST_BUCKET_BYTES = 1 << 20
"""A small first bucket starts the first collective early, as in DDP."""


def refuse_complex(params: Mapping[str, Tensor]) -> None:
    """
    Raises:
        Unsupported: one of ``params`` is complex, of which no policy knows what to make.
    """
    for name, p in params.items():
        if p.is_complex():
            raise Unsupported(
                f"parameter {name!r} is {str(p.dtype).removeprefix('torch.')}: gradients are real numbers. Hold it as "
                "pairs of these, torch.view_as_real(...), and use torch.view_as_complex() of it in forward."
            )


def cut_layouts(params: Mapping[str, Tensor], bucket_bytes: float) -> list[Layout]:
    """Cut a model, last registered parameter first, into layouts of about ``bucket_bytes``; one dtype and device each.

    The first is small, unless they are of infinite size.

    >>> params = {"a": torch.zeros(4), "b": torch.zeros(3), "c": torch.zeros(2, dtype=torch.float64)}
    >>> [layout.names for layout in cut_layouts(params, 28)]
    [('b', 'a'), ('c',)]
    """
    open_shapes: dict[tuple[torch.dtype, torch.device], dict[str, torch.Size]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    cuts: list[dict[str, torch.Size]] = []
    limit = bucket_bytes if math.isinf(bucket_bytes) else min(FIRST_BUCKET_BYTES, bucket_bytes)
    for name, p in reversed(list(params.items())):
        kind = (p.dtype, p.device)
        open_shapes.setdefault(kind, {})[name] = p.shape
        filled[kind] = filled.get(kind, 0) + p.numel() * p.element_size()
        if filled[kind] >= limit:
            cuts.append(open_shapes.pop(kind))
            del filled[kind]
            limit = bucket_bytes
    return [Layout(shapes) for shapes in [*cuts, *open_shapes.values()]]
