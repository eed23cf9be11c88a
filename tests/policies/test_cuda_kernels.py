"""CUDA's kernels in Triton, without a GPU: its interpreter runs them on the CPU, its compiler makes machine code.

What neither shows is whether they are fast, and what a GPU makes of them; ``benchmarks/cuda_check.py`` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", minversion="3.7")  # as in setup.cfg; older ones have other compilers


def python(*arguments: object, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreted() -> None:
    tests = Path(__file__).with_name("interpreted.py")
    print(python("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, TRITON_INTERPRET="1"))


COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import hvdbridge.kernels.cuda as cuda
import hvdbridge.kernels.cuda_flat as cuda_flat
import hvdbridge.kernels.cuda_select as cuda_select
block = {"vector": "*fp32", "block_table": "*i64", "blocks": "i32"}
rows = {"codes": "*u8", "code_stride": "i32", "scales": "*fp32", "scale_stride": "i32"}
several = {"messages": "i32", "rows": "i32"}
steps = {"HIGH": 2.0**13, "LOW": 2.0**14}
kernels = {
    "_linear_encode": (
        {**block, "levels": "fp32", **rows},
        {"OFFSET": 0, "MASK": 255, "KEEP_REST": True, "BYTES": False, "WIDTH": 1024},
    ),
    "_decode": ({**block, **several, **rows}, {"SIGNS": False, "OFFSET": 0, "ADD": -1, "BYTES": False, "WIDTH": 1024}),
    "_sign_encode": (
        {**block, **rows, "codes": "*i32"},
        {"KEEP_REST": True, "BYTES": False, "WIDTH": 1024, "HALVINGS": 10, "PACK": True},
    ),
    "_linear_encode messages": (
        {**block, "levels": "fp32", **rows, "scales": "*u8"},
        {"OFFSET": 0, "MASK": 255, "KEEP_REST": True, "BYTES": True, "WIDTH": 1024},
    ),
    "_decode messages": (
        {**block, **several, **rows, "scales": "*u8"},
        {"SIGNS": True, "OFFSET": 0, "ADD": 0, "BYTES": True, "WIDTH": 1024},
    ),
    "_sign_encode messages": (
        {**block, **rows, "codes": "*i32", "scales": "*u8"},
        {"KEEP_REST": True, "BYTES": True, "WIDTH": 1024, "HALVINGS": 10, "PACK": True},
    ),
    "_finite": (
        {"flat": "*bf16", "count": "i32", "ends": "*i64", "parameters": "i32", "flags": "*u8"},
        {"STEPS": 7, "WIDTH": 1024},
    ),
    "_keep": (
        {"new": "*fp32", "old": "*fp32", "count": "i32", "ends": "*i64", "parameters": "i32", "flags": "*i1",
         "out": "*fp32"},
        {"STEPS": 7, "WIDTH": 1024},
    ),
    "_move": (
        {"target": "*fp16", "source": "*fp32", "table": "*i64", "blocks": "i32", "alpha": "fp32"},
        {"TO_ROWS": True, "ADD": True, "WIDTH": 1024},
    ),
    "_normalize": ({"rows": "*fp32", "length": "i32", "factor": "fp32", "out": "*fp32"}, {"WIDTH": 1024}),
    "_restore": ({"new": "*fp32", "old": "*fp32", "length": "i32", "out": "*fp32"}, {"WIDTH": 1024}),
    "_sum_rows": ({"vectors": "*fp16", "count": "i32", "length": "i32", "out": "*fp32"}, {"WIDTH": 1024}),
    "_pack_codes": ({"words": "*i64", "count": "i32", "out": "*u8"}, {"BITS": 5, "WORDS": 256}),
    "_threshold_bits": (
        {"bits": "*i32", "table": "*i64", "blocks": "i32", "limits": "*i32", "bitmaps": "*i32", "counts": "*i32"},
        {"HEIGHT": cuda_select.HEIGHT, "ALIGNED": True},
    ),
    "_threshold_bits unaligned": (
        {"bits": "*i32", "table": "*i64", "blocks": "i32", "limits": "*i32", "bitmaps": "*i32", "counts": "*i32"},
        {"HEIGHT": cuda_select.HEIGHT, "ALIGNED": False},
    ),
    "_list": (
        {"bitmaps": "*i32", "table": "*i64", "blocks": "i32", "part_table": "*i64", "parts": "i32", "counts": "*i32",
         "ends": "*i32", "positions": "*i32"},
        {"HEIGHT": cuda_select.HEIGHT},
    ),
    "_shuffle": (
        {"owner": "*i64", "count": "i32", "sizes": "*i32", "first": "*i32", "pivots": "*i32", "salts": "*i32",
         "parameters": "i32", "out": "*i32"},
        {"ROUNDS": 20, "WORDS": 256},
    ),
    "_halves": (
        {"matrices": "*fp32", "rank": "i32", "length": "i32", "halves": "*fp64", "units": "*fp64"},
        {**steps, "WIDTH": 4096},
    ),
    "_gram_schmidt": (
        {"products": "*fp64", "rank": "i32", "units": "*fp64", "epsilons": "*fp64", "changes": "*fp64"},
        {**steps, "SIDE": 16, "TOLERANCE": 2.0**-18},
    ),
    "_combine": (
        {"halves": "*fp64", "rank": "i32", "length": "i32", "changes": "*fp64", "blocks": "i32", "out": "*fp32"},
        {**steps, "WIDTH": 1024},
    ),
    "_unpack_codes": ({"packed": "*u8", "count": "i32", "words": "*i64"}, {"BITS": 5, "WORDS": 256}),
}
found = {}
for name, (types, constants) in kernels.items():
    kernel = next(vars(m)[name.split()[0]] for m in (cuda, cuda_flat, cuda_select) if name.split()[0] in vars(m))
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    fixed = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    made = triton.compile(ASTSource(kernel, signature, fixed), GPUTarget("cuda", int(sys.argv[1]), 32), cuda.AS_WRITTEN)
    words = ("fma.rn.f32", "fma.rn.f64", "div.rn.f64", "sqrt.rn.f64", "div.rn.f32", "div.full.f32", "div.approx")
    found[name] = {word: made.asm["ptx"].count(word) for word in words} | {"bytes": len(made.asm["cubin"])}
print(json.dumps(found))
"""


@pytest.mark.parametrize("architecture", [80, 90])
def test_they_compile_for_a_gpu_without_one(architecture: int, tmp_path: Path) -> None:
    """To machine code (A100, H100), in which divisions are IEEE 754's and nothing is contracted."""
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    found = json.loads(python(script, architecture, TRITON_CACHE_DIR=str(tmp_path / "cache")))
    for name, counts in found.items():
        assert counts["bytes"] > 0, name
        assert counts["fma.rn.f32"] == counts["fma.rn.f64"] == counts["div.full.f32"] == counts["div.approx"] == 0, name
    assert {name for name, counts in found.items() if counts["div.rn.f32"]} == {
        "_linear_encode", "_linear_encode messages", "_sign_encode", "_sign_encode messages", "_normalize"
    }  # fmt: skip
    assert found["_gram_schmidt"]["sqrt.rn.f64"] > 0
    assert found["_gram_schmidt"]["div.rn.f64"] > 0
