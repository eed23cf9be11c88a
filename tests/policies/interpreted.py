"""CUDA's kernels on the CPU, by Triton's interpreter: run by test_cuda_kernels.py, in a process of their own."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdbridge.kernels
from hvdbridge.bucket import Bucket, Layout
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels import cuda, fused, native
from hvdbridge.kernels.quantise import Code, Linear, decode, encode
from hvdbridge.kernels.signs import ScaledSign
from hvdbridge.policies.sharded import _code_plan
from policies.test_native import bits, cut, vector

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, tells of NaN
CPU = torch.device("cpu")
CODES = [Linear(127), Linear(7), Linear(63), ScaledSign()]
some = settings(max_examples=25, deadline=None)


def both(work: Any) -> tuple[Any, Any]:
    """What it gives with Triton, and with torch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "fused", lambda *tensors: cuda)
        for name in ("kernels.quantise", "kernels.pack", "policies.sharded"):
            patch.setattr(f"hvdbridge.{name}.fused", lambda *tensors: cuda)
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
    blocks, x = cut(numel, width), vector(seed, numel, special)
    (codes, scales), (their_codes, their_scales) = both(lambda: encode(code, x, blocks, seed))
    assert bits(scales) == bits(their_scales)
    finite = scales.isfinite().repeat_interleave(width)[:numel]  # elsewhere any code comes back non-finite
    assert torch.equal(codes[finite], their_codes[finite])
    rows, rates = torch.stack([codes, codes.flip(0)]), torch.stack([scales, scales.flip(0)])
    for add in (None, 1, -1):
        ours, theirs = both(lambda add=add: decode(code, rows, rates, blocks, x.flip(0).contiguous(), add))
        assert bits(ours) == bits(theirs)


@some
@given(st.integers(0, 2**31), st.sampled_from(CODES), st.sampled_from([256, 1024]), st.integers(1, 3),
       st.lists(st.sampled_from([0, 1, 7, 1000, 1025, 2048]), min_size=1, max_size=3), st.booleans())  # fmt: skip
def test_messages(seed: int, code: Code, width: int, size: int, numels: list[int], keep_rest: bool) -> None:
    """To owners, there added up, and back: messages, what they say, and what they leave."""
    layout = Layout({str(i): (numel,) for i, numel in enumerate(numels)})
    x, y = (vector(seed + i, layout.numel, 0.0) for i in range(2))

    def run() -> list[torch.Tensor]:
        plan = _code_plan(Bucket(x, layout, rank=seed % size, size=size), width)
        rests = [x.clone(), y.clone()]
        sent = [plan.everyone.encode(code, rest, seed, keep_rest) for rest in rests]
        theirs = torch.stack([messages[seed % size] for messages in sent])
        total = plan.own.decode(code, *plan.own.read(code, theirs))
        update = plan.everyone.decode(code, *plan.everyone.read(code, sent[0]))
        return [total, update, *rests, *sent]

    ours, theirs = both(run)
    assert all(map(torch.equal, ours, theirs))


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
    assert chosen("auto", cuda) is cuda
    assert chosen("native", cuda) is cuda
    assert chosen("torch", cuda) is None
    assert not caplog.records


@pytest.mark.parametrize("module", [None, wrong("squeeze")])
def test_kernels_that_do_not_work_are_not_used(module: Any, chosen: Any, caplog: pytest.LogCaptureFixture) -> None:
    reason = "ImportError|ModuleNotFoundError" if module is None else "other bits than the CPU's: 1 bits"
    with caplog.at_level(logging.WARNING, "hvdbridge"):
        assert chosen("auto", module) is None
    assert "HVDBRIDGE_KERNELS=torch" in caplog.text
    with pytest.raises(ConfigurationError, match=reason):
        chosen("native", module)
