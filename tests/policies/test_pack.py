"""Packing against Python's own integers: a row of codes is one number, the first code its lowest digits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdbridge.kernels import pack as packing
from hvdbridge.kernels.pack import pack, pack_bits, packed_bytes, unpack, unpack_bits


def reference(codes: list[int], bits: int) -> list[int]:
    value = sum(code << (bits * i) for i, code in enumerate(codes))
    return list(value.to_bytes(-(-len(codes) * bits // 8), "little"))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 40), st.integers(0, 2**32))
def test_pack_is_one_number_a_row(bits: int, rows: int, n: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, n), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [reference(row, bits) for row in codes.tolist()]
    assert packed.shape == (rows, packed_bytes(n, bits))
    assert torch.equal(unpack(packed, n, bits), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_pieces_do_not_show(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 1 << bits, (2, 1003), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    whole = pack(codes, bits)
    monkeypatch.setattr(packing, "CHUNK", 64)
    assert torch.equal(pack(codes, bits), whole)
    assert torch.equal(unpack(whole, 1003, bits), codes)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 3, 9), (17,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    bits = torch.ones(shape, dtype=torch.bool)
    packed = pack_bits(bits)
    assert packed.shape == (*shape[:-1], -(-shape[-1] // 8))
    assert torch.equal(unpack_bits(packed, shape[-1]).view(torch.bool), bits)
    nibbles = torch.full(shape, 11, dtype=torch.uint8)
    assert torch.equal(unpack(pack(nibbles, 4), shape[-1], 4), nibbles)


def test_views_and_spare_bytes_are_read_right() -> None:
    table = torch.arange(60, dtype=torch.uint8).view(6, 10)
    for codes in (table.t() & 7, (table & 7)[:, 1:8], (table & 7)[::2]):
        assert pack(codes, 3).tolist() == [reference(row, 3) for row in codes.tolist()]
        wide = torch.nn.functional.pad(pack(codes, 3), (0, 5), value=255)  # longer rows than needed
        assert torch.equal(unpack(wide, codes.shape[1], 3), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_may_begin_at_any_byte(bits: int) -> None:
    table = torch.arange(64).remainder(1 << bits).to(torch.uint8)
    for at in range(8):
        codes = table[at : at + 16]
        packed = torch.cat([table[:at], pack(codes, bits)])[at:]
        assert torch.equal(unpack(packed, 16, bits), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_meta_tensors_have_the_same_shapes(bits: int) -> None:
    codes = torch.zeros(3, 11, dtype=torch.uint8, device="meta")
    assert pack(codes, bits).shape == (3, packed_bytes(11, bits))
    assert unpack(pack(codes, bits), 11, bits).shape == (3, 11)


@pytest.mark.parametrize("bits", [0, 9])
def test_impossible_widths(bits: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 8 bits, not {bits}"):
        pack(torch.zeros(3, dtype=torch.uint8), bits)
