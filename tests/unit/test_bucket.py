"""Layouts, views, weights and block numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdbridge.errors import Unsupported
from hvdbridge.policies.shards import BlockShards, FlatShards, shards_of
from hvdbridge.policy.bucket import (
    BLOCK,
    Bucket,
    Layout,
    Ranks,
    Views,
    cut_layouts,
    flatten,
    join_layouts,
    number_blocks,
)

SHAPES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.integers(0, 60), max_size=3).map(tuple) | st.integers(1, 4 * BLOCK).map(lambda n: (n,)),
    min_size=1,
)
sized = settings(max_examples=60, deadline=None)


@sized
@given(SHAPES)
def test_views_and_flatten_are_inverse(shapes: dict[str, tuple[int, ...]]) -> None:
    layout = Layout(shapes)
    flat = torch.arange(float(layout.numel))
    views = Views(layout, flat)
    assert {name: tuple(view.shape) for name, view in views.items()} == shapes
    assert flatten(views, layout) is flat
    assert torch.equal(flatten(dict(views), layout), flat)


def test_a_part_is_cached_and_keeps_the_order() -> None:
    layout = Layout({"a": (2,), "b": (3,), "c": ()})
    part = layout.part(["c", "a"])
    assert part.names == ("a", "c")
    assert part is layout.part({"a", "c"})
    assert layout.part("abc") is layout
    assert join_layouts([part, layout.part("b")]).names == ("a", "c", "b")


def test_views_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 elements"):
        Views(Layout({"a": (3,)}), torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weighted_multiplies_once_by_a_double(dtype: torch.dtype) -> None:
    weights = (0.1, 0.2, 0.7)
    values = torch.randn(50, dtype=torch.float64).to(dtype)
    bucket = Bucket(values.clone(), Layout({"a": (50,)}), ranks=Ranks(1, 3, weights))
    assert bucket.weighted() is bucket.weighted()
    assert torch.equal(bucket.buffer, values * (0.2 / math.fsum(weights)))


def test_weight_zero_erases_even_nan() -> None:
    bucket = Bucket(torch.tensor([1.0, math.nan, math.inf]), Layout({"a": (3,)}), ranks=Ranks(0, 2, (0.0, 1.0)))
    assert bucket.weighted().buffer.tolist() == [0.0, 0.0, 0.0]


def test_plus_widens_and_remembers_the_gradients_type() -> None:
    types = dict.fromkeys("ab", torch.bfloat16)
    bucket = Bucket(torch.ones(3, dtype=torch.bfloat16), Layout({"a": (2,), "b": (1,)}, dtypes=types))
    wider = bucket.plus({"b": torch.full((1,), 0.001), "a": torch.zeros(2)})
    assert wider.buffer.dtype == torch.float32
    assert wider.buffer[2] == torch.tensor(1.001)
    assert wider.layout.dtypes == types
    assert wider.layout.part("a").dtypes == types


def test_place_names_the_known_groups() -> None:
    bucket = Bucket(torch.zeros(1), Layout({"a": (1,)}), ranks=Ranks(3, 4, groups={"node": (1, 2)}))
    assert (bucket.place("world"), bucket.place("node")) == ((3, 4), (1, 2))
    with pytest.raises(Unsupported, match="known: world, node"):
        bucket.place("cross")


@sized
@given(SHAPES, st.integers(1, 5), st.booleans())
def test_shards_pack_and_unpack(shapes: dict[str, tuple[int, ...]], size: int, by_blocks: bool) -> None:
    layout = Layout(shapes)
    flat = torch.randn(layout.numel)
    shards = shards_of(Bucket(flat, layout, ranks=Ranks(0, size), needs_sent=by_blocks))
    assert isinstance(shards, BlockShards if by_blocks else FlatShards)
    rows = shards.pack(flat, torch.float64, power=2.0)
    assert rows.shape == (size, shards.length)
    assert rows.count_nonzero() == flat.count_nonzero()
    assert torch.equal(shards.unpack(rows, torch.float32), flat * 2)


@sized
@given(SHAPES, st.integers(1, 5), st.integers(0, 5))
def test_block_owners_do_not_depend_on_buckets(shapes: dict[str, tuple[int, ...]], size: int, cut: int) -> None:
    """Block j of the model belongs to rank j mod N, whichever bucket it travels in."""
    blocks = number_blocks(shapes)
    names = list(shapes)
    for bucket_names in (names[:cut], names[cut:]):
        layout = Layout({name: shapes[name] for name in reversed(bucket_names)})  # the order does not matter either
        owners = torch.empty(layout.numel)
        for name in layout.names:
            for i in range(layout.sizes[name]):
                owners[layout.offsets[name] + i] = (blocks[name] + i // BLOCK) % size
        rows = BlockShards(layout, blocks, size).pack(owners + 1, torch.float32)
        for owner, row in enumerate(rows):
            assert set(row.tolist()) <= {owner + 1.0, 0.0}


class Counted:
    """A parameter that counts how often somebody asks for its size."""

    shape, dtype, device, asked = torch.Size((8,)), torch.float32, torch.device("cpu"), 0

    def numel(self) -> int:
        self.asked += 1
        return 8

    def element_size(self) -> int:
        return 4


def test_cutting_looks_at_each_parameter_once() -> None:
    """A bucket of DDP's size may hold a hundred thousand small ones."""
    params = {f"p{i}": Counted() for i in range(100)}
    assert len(cut_layouts(params, 25 * 2**20)) == 1  # type: ignore[arg-type]
    assert all(p.asked <= 1 for p in params.values())
    assert [len(layout.names) for layout in cut_layouts(params, 40 * 32)] == [40, 40, 20]  # type: ignore[arg-type]
