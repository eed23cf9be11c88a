"""CUDA's kernels on the CPU, by Triton's interpreter: run by test_cuda_kernels.py, in a process of their own."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hvdbridge.kernels
from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import simulate
from hvdbridge.kernels import cuda, cuda_select, fused, native, orthogonal, pack, select
from hvdbridge.kernels.codes import Linear
from hvdbridge.kernels.quantise import Code
from hvdbridge.kernels.signs import ScaledSign
from hvdbridge.policies.sharded import _code_plan
from hvdbridge.policy.bucket import Bucket, Layout, Ranks
from hvdbridge.tools import gpu_kernels
from policies.test_native import same_codes, same_messages, vector

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, tells of NaN
CPU = torch.device("cpu")
CODES = [Linear(127), Linear(7), Linear(63), ScaledSign()]
some = settings(max_examples=10, deadline=None)


def both(work: Any) -> tuple[Any, Any]:
    """What it gives with Triton, and with torch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "fused", lambda *tensors, packs=False: cuda)
        for name in ("kernels.quantise", "kernels.pack", "policies.sharded"):
            patch.setattr(f"hvdbridge.{name}.fused", lambda *tensors, packs=False: cuda)
        ours = work()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_load", lambda: None)
        return ours, work()


def test_the_bits_that_a_device_must_give() -> None:
    assert gpu_kernels.differences(CPU) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whatever_the_user_has_for_a_default(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert gpu_kernels.differences(CPU) == ""
    finally:
        torch.set_default_dtype(torch.float32)


@some
@given(st.integers(0, 2**31), st.sampled_from(CODES), st.sampled_from([256, 1024]), st.integers(1, 4_000),
       st.sampled_from([0.0, 0.001, 0.3]))  # fmt: skip
def test_codes(seed: int, code: Code, width: int, numel: int, special: float) -> None:
    same_codes(both, seed, code, width, numel, special)


@some
@given(st.integers(0, 2**31), st.sampled_from(CODES), st.sampled_from([256, 1024]), st.integers(1, 3),
       st.lists(st.sampled_from([0, 1, 7, 1000, 1025, 2048]), min_size=1, max_size=3), st.booleans())  # fmt: skip
def test_messages(seed: int, code: Code, width: int, size: int, numels: list[int], keep_rest: bool) -> None:
    same_messages(both, seed, code, width, size, numels, 0.0, keep_rest)


@some
@given(st.integers(0, 2**31), st.sampled_from([16, 64, 1024]), st.integers(1, 3),
       st.lists(st.sampled_from([1, 7, 33, 1000, 1025, 2048]), min_size=1, max_size=4))  # fmt: skip
def test_signs_packed_in_the_same_pass(seed: int, width: int, size: int, numels: list[int]) -> None:
    """Blocks begin and end anywhere in a word."""
    layout, code = Layout({str(i): (numel,) for i, numel in enumerate(numels)}), ScaledSign()
    x = vector(seed, layout.numel, 0.0)
    bucket = Bucket(x, layout, ranks=Ranks(0, size))
    blocks = _code_plan(bucket, width).all_shards._blocks
    length = blocks.length
    codes, words = (
        torch.zeros((size, n), dtype=t) for n, t in ((length, torch.uint8), (-(-length // 32), torch.int32))
    )
    scales, again = torch.zeros((2, size, length))
    assert cuda.encode(code.fields, x.clone(), blocks, codes, scales, False, 0)
    assert cuda.encode(code.fields, x, blocks, words, again, False, 0)
    assert torch.equal(words.view(torch.uint8)[:, : code.wire_bytes(length)], pack.pack(codes, 1))
    assert torch.equal(scales, again)


@some
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 6), st.integers(1, 1_300),
       st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 1e-8, 0.5]))  # fmt: skip
def test_orthonormal(seed: int, batch: int, rank: int, length: int, special: float, epsilon: float) -> None:
    x = vector(seed, batch * rank * length, special).view(batch, rank, length)
    found = cuda.orthonormal(x, epsilon, *gpu_kernels.CONSTANTS)
    (expected,) = orthogonal.orthonormal([x], epsilon)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def search(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices and empty slots by the kernels, which must be those that the CPU's search finds."""
    plan = select.Plan.of(Layout({"before": (7,), "w": (x.numel() - 7,)}), {"before": 2, "w": count}, CPU)
    assert plan.large[0].listed
    bits, mask = select._bits(x)
    ours = select._largest(bits, plan, mask, kernels=True)[0]
    theirs = select._largest_on_cpu(bits, plan, mask)
    rows = slice(plan.counts["before"], None)  # small parameters have no kernel
    assert torch.equal(ours[rows].sort().values, theirs[0][rows].sort().values)
    return theirs


@some
@given(st.integers(0, 2**31), st.integers(1 << 16, 90_000), st.sampled_from([1, 10, 300]),
       st.sampled_from([0.0, 0.001, 0.9]))  # fmt: skip
def test_the_largest(seed: int, numel: int, count: int, special: float) -> None:
    """Without a look at what was found, and among equal ones the first: with ``special`` of 0.9 most are equal."""
    search(vector(seed, numel, special), count)


@pytest.mark.parametrize("special", [0.0, 0.3])
def test_the_largest_of_several_parameters(special: float) -> None:
    """All are searched at once, between smaller ones and beside one that has no sample."""
    sizes = {"a": 60_001, "b": 9, "c": 90_000, "d": 33_000, "e": 34_000}
    counts = {"a": 400, "b": 3, "c": 900, "d": 20_000, "e": 1}
    layout = Layout({name: (size,) for name, size in sizes.items()})
    plan = select.Plan.of(layout, counts, CPU)
    assert [part.listed for part in plan.large] == [True, True, False, True]
    bits, mask = select._bits(vector(3, layout.numel, special))
    found, expected = select._largest(bits, plan, mask, kernels=True), select._largest_on_cpu(bits, plan, mask)
    for part in plan.large:
        slots = slice(part.slot, part.slot + part.count)
        if part.listed or not special:  # of equal ones torch.topk may select others
            assert torch.equal(found[0][slots].sort().values, expected[0][slots].sort().values)
        assert torch.equal(found[1][slots].sort().values, expected[1][slots].sort().values)


def test_more_equal_ones_than_there_is_room_for() -> None:
    """All equal; and in front of the few that are larger, which still come first."""
    x = torch.full((60_000,), -2.0)
    indices, empty = search(x, 500)
    assert indices.tolist() == [0, 1, *range(7, 507)]
    assert not empty.any()
    x[-300:] = torch.tensor([3.0, math.inf, math.nan]).repeat(100)
    indices, _ = search(x, 500)
    assert indices.tolist()[2:] == [*range(7, 207), *range(59_700, 60_000)]
    indices, empty = search(torch.zeros(60_000), 500)
    assert empty.all()
    assert not indices.any()


def test_a_policy_with_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank with a GPU sends of a large parameter is what one without would."""
    grads = [{"w": vector(seed, 70_000, 0.0), "b": vector(seed, 5, 0.0)} for seed in range(2)]
    for spec in ("topk:ratio=0.01", "threshold:value=1.0", "dgc:ratio=0.01"):
        found = []
        for way in (select._largest_on_cpu, lambda bits, plan, mask: select._largest(bits, plan, mask, kernels=True)):
            with monkeypatch.context() as patch:
                patch.setattr(select, "_largest_on_cpu", way)
                found.append(simulate(spec, [{name: g.clone() for name, g in each.items()} for each in grads])[0])
        assert all(torch.equal(found[0][name], found[1][name]) for name in grads[0])


@pytest.mark.parametrize(
    "named",
    [
        {"encode": "Linear", "pack_codes": "3 bits", "threshold_positions": "those that reach [1, 2, 4, 1]",
         "finite": "flat torch.float32, 2 not finite", "keep": "flat torch.float16, 1 not finite"},
        {"decode": "ScaledSign", "unpack_codes": "3 bits", "shuffle": "a shuffle", "orthonormal": "4 columns",
         "sum_rows": "flat torch.bfloat16, 0 not finite", "normalized": "rows of 5", "restored": "rows of 1",
         "move": "blocks of 1 as torch.float16"},
    ],
)  # fmt: skip
def test_kernels_that_do_nothing_are_found_out(named: dict[str, str]) -> None:
    """Several at once, each of which is named by words of its own."""
    found = gpu_kernels.differences(CPU, dict.fromkeys(named, lambda *_, **__: torch.zeros(1)))
    assert [name for name, words in named.items() if words not in found] == []


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Who computes for a GPU; the CPU stands for one."""

    def choose(kernels: str, module: Any) -> Any:
        monkeypatch.setenv("HVDBRIDGE_KERNELS", kernels)
        monkeypatch.setitem(sys.modules, "hvdbridge.kernels.cuda", module)
        monkeypatch.setattr(hvdbridge.kernels, "cuda", module)
        return fused.on_cuda.__wrapped__(CPU)

    return choose


def test_who_computes_on_a_gpu(chosen: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvdbridge"):
        assert chosen("auto", cuda) is cuda
        assert chosen("native", cuda) is cuda
        assert chosen("torch", cuda) is None
    assert not caplog.records


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no C compiler")

    for module in (cuda, cuda_select):
        monkeypatch.setattr(module, "_launch", launch)
    monkeypatch.setattr(cuda, "_broken", set())


@pytest.mark.parametrize("module", [None, cuda])
@pytest.mark.usefixtures("failing")
def test_kernels_that_do_not_work_are_not_used(module: Any, chosen: Any, caplog: pytest.LogCaptureFixture) -> None:
    reason = "ImportError|ModuleNotFoundError" if module is None else "RuntimeError: no C compiler"
    with pytest.raises(ConfigurationError, match=reason):
        chosen("native", module)
    with caplog.at_level(logging.WARNING, "hvdbridge"):
        assert chosen("auto", module) is None
    assert "HVDBRIDGE_KERNELS=torch" in caplog.text


@pytest.mark.usefixtures("failing")
def test_a_kernel_that_does_not_compile_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """And torch's operations do its work."""
    with caplog.at_level(logging.WARNING, "hvdbridge"):
        for _ in range(2):
            for code in (Linear(7), ScaledSign()):
                same_messages(both, 1, code, 256, 2, [1000, 7, 2048], 0.0, True)
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 4, named
    for name in ("encode", "decode", "pack_codes", "unpack_codes"):
        assert sum(f"Triton's kernel {name} " in text and "no C compiler" in text for text in named) == 1
    x = vector(1, 60_000, 0.0)
    plan = select.Plan.of(Layout({"w": (60_000,)}), {"w": 500}, CPU)
    assert plan.large[0].listed
    bits, mask = select._bits(x)
    ours = select._largest(bits, plan, mask, kernels=True)[0]
    assert torch.equal(ours.sort().values, select._largest_on_cpu(bits, plan, mask)[0].sort().values)
