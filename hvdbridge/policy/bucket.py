"""Buckets: flat tensors that hold the gradients of several parameters, addressed by parameter name.

Rules:

1. A policy receives a raw bucket: rank r's local gradients, not yet weighted.
2. :meth:`Bucket.weighted` multiplies once by the double ``w_r / sum(w)``. A second call does nothing, so wrappers
   compose without scaling twice. The plain sum over ranks is then the weighted mean.
3. A rank of weight 0 contributes zeros. They are written, not multiplied, so that its NaN does not spread.
4. State is keyed by parameter name, because bucket boundaries move between steps.
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
from hvdbridge.policy.capture import refuse_in_capture

T = TypeVar("T")


BLOCK = 1024
"""Number of elements of a block. Each block has one owner rank in sharded policies."""


def number_blocks(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the model-wide index of each parameter's first block. Every parameter starts a new block.

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
    """The shape of each parameter and its offset in a flat buffer.

    Layouts are immutable except for :meth:`of_model`. They are compared by identity, so callers cache them.

    Attributes:
        names: parameter names in the order of the buffer.
        shapes, sizes, offsets: shape, number of elements and first element of each parameter, by name.
        numel: number of elements of the buffer.
        blocks: model-wide index of each parameter's first block of :data:`BLOCK` elements, in the order of
            ``Policy.init``. It decides which rank owns which block in sharded policies. Default: counted within this
            layout.
        dtypes: dtype of each gradient of the model before it was copied into a bucket. The buffer's dtype may be wider,
            as where parameters of several dtypes share a bucket. Empty: the dtype of the buffer.

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
        """Set :attr:`blocks` and :attr:`dtypes` of the whole model, and return this layout. Comes before
        :meth:`derive`."""
        self.blocks, self.dtypes = blocks, dtypes
        return self

    def derive(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, cached under ``key`` for the lifetime of this layout: plans, indices, parts."""
        if key not in self._derived:
            refuse_in_capture(f"a table {key} of {self!r}, which no flow before it has made")
            self._derived[key] = make()
        return cast(T, self._derived[key])

    def part(self, names: Iterable[str]) -> Layout:
        """Return the layout of some of the parameters, in this layout's order. Equal names give the same object.

        >>> layout = Layout({"weight": (2, 3), "bias": (3,)})
        >>> layout.part({"bias"}).names, layout.part({"bias", "weight"}) is layout
        (('bias',), True)
        """
        chosen = set(names)
        ordered = tuple(name for name in self.names if name in chosen)
        if ordered == self.names:
            return self
        shapes = {name: self.shapes[name] for name in ordered}
        return self.derive(("part", ordered), lambda: Layout(shapes, self.blocks, self.dtypes))

    @staticmethod
    def readable(flat: Tensor) -> bool:
        """Return whether the host may read values of ``flat``: it waits for no device then."""
        return flat.device.type == "cpu"

    def finite(self, flat: Tensor) -> Tensor:
        """Return for each parameter whether all its elements in ``flat`` are finite: bool ``[parameters]``.

        The host does not wait for the device.

        >>> Layout({"weight": (2,), "none": (0,), "bias": (1,)}).finite(torch.tensor([1.0, math.inf, 2.0]))
        tensor([False,  True,  True])
        """
        starts, ends = self.bounds(flat.device)
        nonfinite = torch.zeros(self.numel + 1, dtype=torch.int32, device=flat.device)  # count before each offset
        torch.cumsum(flat - flat != 0, 0, dtype=torch.int32, out=nonfinite[1:])  # inf - inf is NaN
        return nonfinite[ends] == nonfinite[starts]

    def spread(self, flags: Tensor) -> Tensor:
        """Repeat each parameter's flag for all its elements: bool ``[parameters]`` -> bool ``[numel]``.

        The host does not wait for the device.

        >>> Layout({"weight": (2,), "none": (0,), "bias": (3,)}).spread(torch.tensor([True, True, False]))
        tensor([ True,  True, False, False, False])
        """
        changes = flags.to(torch.int8)
        changes[1:] -= flags[:-1].to(torch.int8)
        # No repeat_interleave: on a GPU it uses one warp per parameter, which is slow for large parameters
        steps = torch.zeros(self.numel + 1, dtype=torch.int8, device=flags.device)
        steps.index_add_(0, self.bounds(flags.device)[0], changes)
        return torch.cumsum(steps, 0, dtype=torch.int8)[:-1].view(torch.bool)

    def bounds(self, device: torch.device) -> Tensor:
        """Return each parameter's first element, and the one after its last: int64 ``[2, parameters]``."""

        def make() -> Tensor:
            bounds = [*self.offsets.values(), self.numel]
            return torch.tensor([bounds[:-1], bounds[1:]], dtype=torch.int64, device=device)

        return self.derive(("bounds", device), make)

    def __repr__(self) -> str:
        return f"Layout({len(self.names)} parameters, {self.numel} elements)"

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return an uninitialized flat buffer, ``[numel]``."""
        return torch.empty(self.numel, dtype=dtype, device=device)


class Views(Mapping[str, Tensor]):
    """Lazy mapping from parameter name to a view of a flat tensor in the parameter's shape."""

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
    """Return ``tensors`` as one flat tensor in the order of ``layout``. Views of that layout are not copied."""
    if isinstance(tensors, Views) and tensors.layout is layout:
        return tensors.flat
    return torch.cat([tensors[name].reshape(-1) for name in layout.names])


Number = float | Tensor
"""A number that differs between steps: a float, or a float64 tensor of shape ``[]`` (:meth:`Bucket.number`)."""


def scale(flat: Tensor, factor: Number) -> Tensor:
    """Multiply ``flat`` in place and return it. A float of 0 writes zeros, because NaN * 0 is NaN; a tensor is not 0.

    The product has the bits of a product by the factor rounded to the accumulator's type, whichever form it has.
    """
    if isinstance(factor, Tensor):
        wide = torch.promote_types(flat.dtype, torch.float32)  # an operand of a narrow type would round the factor
        return flat.mul_(factor.to(wide)) if flat.dtype == wide else flat.copy_(flat.to(wide).mul_(factor.to(wide)))
    if factor == 0.0:
        return flat.zero_()
    return flat if factor == 1.0 else flat.mul_(factor)


@dataclass(eq=False)
class WeightingState:
    """State that a bucket shares with all its copies: whether the gradients that its flow sends are weighted."""

    weighted: bool = False


Weights = tuple[float, ...] | None
"""The weight of each rank in a step (doubles); None if no rank set one (all equal)."""


@dataclass(frozen=True)
class Ranks:
    """The ranks among which a bucket is aggregated.

    Attributes:
        rank, size: this rank, and the number of ranks, in the synchronizer's group.
        weights: weight of each rank in this step (doubles); None if no rank set one (all equal).
        groups: this rank's rank in each named group, and the group's size: ``{"node": (1, 4), ...}``.
        nodes: the node that each rank runs on (any numbers, equal within a node); empty: unknown.
    """

    rank: int = 0
    size: int = 1
    weights: Weights = None
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """This rank's share of the weights, ``w_r / sum(w)``."""
        return 1.0 / self.size if self.weights is None else self.weights[self.rank] / sum(self.weights)

    def place(self, group: str) -> tuple[int, int]:
        """Return this rank's rank in ``group``, and the group's size.

        Raises:
            Unsupported: no group of this name is known.
        """
        if group == "world":
            return self.rank, self.size
        if group not in self.groups:
            known = ", ".join(["world", *sorted(self.groups)])
            raise Unsupported(f"the size of group {group!r} is not known here; known: {known}")
        return self.groups[group]


@dataclass(eq=False)
class Bucket:
    """One flat part of this rank's gradient, and all that a policy may know about it.

    Attributes:
        buffer: flat gradients, floating point, ``[layout.numel]``. The flow owns it and may overwrite it.
        layout: shape and offset of each parameter in ``buffer``.
        index: index of the bucket in this step, the same on all ranks.
        step: number of the step, from 0. Steps without synchronization do not count.
        seed: key of the random numbers that ranks share; equal on all ranks.
        ranks: the ranks that aggregate the bucket, and their weights.
        needs_sent: the caller needs :attr:`Aggregated.rest`, or :attr:`Aggregated.sent` with ``buffer`` unchanged after
            :meth:`weighted`. Equal on all ranks.
        scaled: :meth:`weighted` has been applied to ``buffer``.
        weighting: a flag that all copies of this bucket share. A new copy sets it to its own ``scaled``, and
            :meth:`weighted` sets it to True. So a wrapper reads here whether its inner policy has called that method.
        last: no bucket of this step follows.
        spare: a buffer like ``buffer`` that may be overwritten, or None; see :meth:`output`.
        pool: buffer pool. A flow takes buffers for messages and gives them back. It also takes buffers for new state,
            which the state store gives back.
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
        """This rank in the synchronizer's group."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks in the synchronizer's group."""
        return self.ranks.size

    @property
    def weights(self) -> Weights:
        """Weight of each rank in this step (doubles); None if no rank set one (all equal)."""
        return self.ranks.weights

    def place(self, group: str) -> tuple[int, int]:
        """Return this rank's rank in ``group`` ("world", "node", "cross"), and the group's size.

        Raises:
            Unsupported: no group of this name is known.
        """
        return self.ranks.place(group)

    @property
    def grads(self) -> Views:
        """Lazy mapping from parameter name to a view of its gradient in :attr:`buffer`."""
        return Views(self.layout, self.buffer)

    @property
    def weight(self) -> float:
        """This rank's weight; 1.0 if no rank set one."""
        return 1.0 if self.weights is None else self.weights[self.rank]

    @property
    def factor(self) -> float:
        """This rank's share of the weights, ``w_r / sum(w)``."""
        return self.ranks.share

    def decide(self, choose: Callable[[int, Weights], T]) -> T:
        """Return ``choose(step, weights)``, on which the course of the flow depends.

        A flow may be captured as a CUDA graph in one step, and replayed in steps in which all its decisions have the
        same values. All ranks must decide alike. A flow that reads :attr:`step` or the weights in another way than by
        :meth:`decide`, :meth:`number` and :meth:`integers` is never captured.

        >>> Bucket(torch.ones(3), Layout({"p": (3,)}), step=4).decide(lambda step, weights: step % 2 == 0)
        True
        """
        return choose(self.step, self.weights)

    def number(self, compute: Callable[[Ranks], float]) -> Number:
        """Return ``compute(ranks)``. In a captured flow it is a float64 tensor of shape ``[]`` on the buffer's device,
        which has the value of each replayed step."""
        return compute(self.ranks)

    def integers(self, compute: Callable[[int], Sequence[int]]) -> Sequence[int] | Tensor:
        """Return ``compute(step)``, integers of up to 63 bits. In a captured flow it is an int64 tensor on the buffer's
        device, which has the values of each replayed step."""
        return compute(self.step)

    @property
    def excluded(self) -> bool:
        """True if this rank's weight is 0."""
        return self.rank in self.decide(lambda _, weights: [r for r, weight in enumerate(weights or ()) if not weight])

    @property
    def share(self) -> Number:
        """This rank's share of the weights, ``w_r / sum(w)``; a float if it is equal in all steps, or 0."""
        if self.excluded:
            return 0.0
        if self.decide(lambda _, weights: weights is None):
            return 1.0 / self.size
        return self.number(lambda ranks: ranks.share)

    def weighted(self) -> Bucket:
        """Scale :attr:`buffer` in place by :attr:`factor`, and return this bucket. A second call does nothing.

        >>> bucket = Bucket(torch.ones(3), Layout({"p": (3,)}), ranks=Ranks(1, 2, (3.0, 1.0)))
        >>> bucket.weighted().weighted().buffer
        tensor([0.2500, 0.2500, 0.2500])
        """
        if not self.scaled:
            scale(self.buffer, self.share)
            self.scaled = True
        self.weighting.weighted = True
        return self

    def output(self, dtype: torch.dtype) -> Tensor:
        """Return the output buffer: flat and uninitialized, ``[layout.numel]``, for the update.

        Unless :attr:`needs_sent`, it may be ``buffer`` itself, so a flow calls this after its last read of ``buffer``.

        >>> bucket = Bucket(torch.ones(3), Layout({"p": (3,)}))
        >>> bucket.output(torch.float32) is bucket.buffer, bucket.output(torch.float64).dtype
        (True, torch.float64)
        """
        reusable = self.spare if self.needs_sent else self.buffer
        fits = reusable is not None and reusable.dtype == dtype and reusable.numel() == self.layout.numel
        return reusable if reusable is not None and fits else self.layout.empty(dtype, self.buffer.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat, uninitialized scratch buffer on the bucket's device. The flow gives it back to the pool."""
        return self.pool.take(numel, dtype, self.buffer.device)

    def fresh(self, like: Tensor) -> Tensor:
        """Return an uninitialized buffer like the flat tensor ``like``, for new state."""
        return self.pool.take(like.numel(), like.dtype, like.device, lasting=True)

    def plus(self, tensors: Mapping[str, Tensor]) -> Bucket:
        """Return a copy of this bucket with ``tensors`` added (name -> tensor of the parameter's shape); dtypes are
        promoted."""
        return replace(self, buffer=self.buffer + flatten(tensors, self.layout))

    def with_buffer(self, buffer: Tensor) -> Bucket:
        """Return a copy of this bucket with another buffer of the same layout."""
        return replace(self, buffer=buffer)


FORMER = {
    "room": "output", "memory": "pool", "rooms": "pool", "mark": "weighting", "groups": "ranks.groups",
    "nodes": "ranks.nodes", "blocks": "layout.blocks", "dtypes": "layout.dtypes",
}  # fmt: skip
"""Deprecated attributes of a bucket -> their replacements."""
FORMER_ORDER = (
    "rank", "size", "weights", "needs_sent", "blocks", "groups", "nodes", "scaled", "dtypes", "mark", "last", "spare",
    "memory", "rooms",
)  # fmt: skip
"""Deprecated order of the positional arguments after ``seed``."""
MOVED_FIELDS = {"rank", "size", "weights", "groups", "nodes", "blocks", "dtypes"}  # to Ranks and Layout


def accept_former(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of :class:`Bucket` to accept deprecated fields, as in ``replace(bucket, rank=1)``."""

    @wraps(init)
    def accept(self: Bucket, *arguments: Any, **fields: Any) -> None:
        if len(arguments) > 5 + len(FORMER_ORDER):
            raise TypeError(f"Bucket takes at most {5 + len(FORMER_ORDER)} positional arguments, got {len(arguments)}")
        if len(arguments) > 5 and not isinstance(arguments[5], Ranks):
            fields |= dict(zip(FORMER_ORDER, arguments[5:], strict=False))
            arguments = arguments[:5]
        for name in {"mark", "memory", "rooms"} & fields.keys():
            warnings.warn(f"Bucket takes {FORMER[name]}= in place of {name}=", DeprecationWarning, stacklevel=2)
            fields[FORMER[name]] = fields.pop(name)
        former = {name: fields.pop(name) for name in MOVED_FIELDS & fields.keys()}
        init(self, *arguments, **fields)
        if not former:
            return
        names = ", ".join(sorted(former))
        text = f"Bucket takes {names} in ranks=hvdbridge.policy.bucket.Ranks(...) and Layout(...)"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        if changed := {name: former.pop(name) for name in ("blocks", "dtypes") if name in former}:
            current: dict[str, Any] = {"blocks": self.layout.blocks, "dtypes": self.layout.dtypes}
            self.layout = Layout(self.layout.shapes, **(current | changed))
        self.ranks = replace(self.ranks, **former)

    return accept


Bucket.__init__ = accept_former(Bucket.__init__)  # type: ignore[method-assign]


def join_layouts(layouts: Iterable[Layout]) -> Layout:
    """Concatenate several layouts into one."""
    return Layout({name: shape for layout in layouts for name, shape in layout.shapes.items()})


DDP_MB = 25.0
"""DDP's default bucket size in MiB."""
FIRST_BUCKET_BYTES = 1 << 20
"""Size of the first bucket. It is small, as in DDP, so that the first collective starts early."""


def cut_layouts(params: Mapping[str, Tensor], bucket_bytes: float) -> list[Layout]:
    """Divide a model's parameters, last registered first, into layouts of about ``bucket_bytes`` bytes.

    Each layout has one dtype and device. The first has about :data:`FIRST_BUCKET_BYTES` or less, unless
    ``bucket_bytes`` is infinite.

    >>> params = {"a": torch.zeros(4), "b": torch.zeros(3), "c": torch.zeros(2, dtype=torch.float64)}
    >>> [layout.names for layout in cut_layouts(params, 28)]
    [('b', 'a'), ('c',)]
    """
    open_shapes: dict[tuple[torch.dtype, torch.device], dict[str, torch.Size]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    cuts: list[dict[str, torch.Size]] = []
    limit = bucket_bytes if math.isinf(bucket_bytes) else min(FIRST_BUCKET_BYTES, bucket_bytes)
    for name, p in reversed(list(params.items())):
        kind = (p.dtype, p.device)
        open_shapes.setdefault(kind, {})[name] = p.shape
        open_bytes[kind] = open_bytes.get(kind, 0) + p.numel() * p.element_size()
        if open_bytes[kind] >= limit:
            cuts.append(open_shapes.pop(kind))
            del open_bytes[kind]
            limit = bucket_bytes
    return [Layout(shapes) for shapes in [*cuts, *open_shapes.values()]]
