"""CUDA's kernels on the CPU, by Triton's interpreter: run by test_cuda_kernels.py, in a process of their own."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdbridge.kernels
from hvdbridge.bucket import Bucket, Layout
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels import cuda, fused, native, pack
from hvdbridge.kernels.quantise import Code, Linear
from hvdbridge.kernels.signs import ScaledSign
from hvdbridge.policies.sharded import _code_plan
from policies.test_native import same_codes, same_messages, vector

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, tells of NaN
CPU = torch.device("cpu")
CODES = [Linear(127), Linear(7), Linear(63), ScaledSign()]
some = settings(max_examples=25, deadline=None)


def both(work: Any) -> tuple[Any, Any]:
    """What it gives with Triton, and with torch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "fused", lambda *tensors, bits=8: cuda)
        for name in ("kernels.quantise", "kernels.pack", "policies.sharded"):
            patch.setattr(f"hvdbridge.{name}.fused", lambda *tensors, bits=8: cuda)
        ours = work()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_load", lambda: None)
        return ours, work()


def test_the_bits_that_a_device_must_give() -> None:
    assert fused.differences(cuda, CPU) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whatever_the_user_has_for_a_default(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert fused.differences(cuda, CPU) == ""
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
    bucket = Bucket(x, layout, size=size)
    places, length = _code_plan(bucket, width).everyone._places, _code_plan(bucket, width).shards.length
    codes, words = torch.zeros((size, length), dtype=torch.uint8), code.room(cuda, size, length, CPU)
    scales, again = torch.zeros((2, size, length))
    code.encode_fused(cuda, x.clone(), places, codes, scales)
    code.encode_fused(cuda, x, places, words, again)
    assert torch.equal(code.to_wire(words)[:, : code.wire_bytes(length)], pack.pack(codes, 1))
    assert torch.equal(scales, again)


def wrong(name: str) -> Any:
    class Wrong:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(cuda, attribute) if attribute != name else lambda *arguments, **options: None

    return Wrong()


@pytest.mark.parametrize(
    ("name", "named"),
    [("linear_encode", "Linear"), ("linear_decode", "Linear"), ("sign_encode", "ScaledSign"),
     ("sign_decode", "ScaledSign"), ("squeeze", "3 bits"), ("spread", "3 bits")],
)  # fmt: skip
def test_a_kernel_that_does_nothing_is_found_out(name: str, named: str) -> None:
    assert named in fused.differences(wrong(name), CPU)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Who computes for a GPU; the CPU stands for one."""

    def choose(kernels: str, module: Any) -> Any:
        monkeypatch.setenv("HVDBRIDGE_KERNELS", kernels)
        monkeypatch.setitem(sys.modules, "hvdbridge.kernels.cuda", module)
        monkeypatch.setattr(hvdbridge.kernels, "cuda", module)
        return fused._on_cuda.__wrapped__(CPU)

    return choose


def test_who_computes_on_a_gpu(chosen: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvdbridge"):
        assert chosen("auto", cuda) is cuda
        assert chosen("native", cuda) is cuda
        assert chosen("torch", cuda) is None
    assert [record.levelname for record in caplog.records] == ["INFO"] * 2
    assert re.search(r"Triton's kernels took [\d.]+ s to compile", caplog.text)


@pytest.mark.parametrize("module", [None, wrong("squeeze")])
def test_kernels_that_do_not_work_are_not_used(module: Any, chosen: Any, caplog: pytest.LogCaptureFixture) -> None:
    reason = "ImportError|ModuleNotFoundError" if module is None else "other bits than the CPU's: 1 bits"
    with caplog.at_level(logging.WARNING, "hvdbridge"):
        assert chosen("auto", module) is None
    assert "HVDBRIDGE_KERNELS=torch" in caplog.text
    with pytest.raises(ConfigurationError, match=reason):
        chosen("native", module)
