"""The CPU's kernels in C against the torch operations that they replace: the same bits, or none of them."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.kernels import build, candidates, native, pack, select
from hvdbridge.kernels.blocks import Blocks, Part, block_table
from hvdbridge.kernels.codes import Float8, Linear, PowerOfTwo
from hvdbridge.kernels.quantise import Code, decode, encode
from hvdbridge.kernels.random import hashed_bits
from hvdbridge.kernels.runs import SHORT, Runs
from hvdbridge.kernels.signs import ScaledSign
from hvdbridge.policies.feedback import _corrected
from hvdbridge.policies.matrices import COLS, ROWS, add_outer, empty_aligned, project
from hvdbridge.policies.sharded import _code_plan
from hvdbridge.policies.shards import BlockShards
from hvdbridge.policy.bucket import Bucket, Layout, Ranks, Views
from hvdbridge.policy.buffer_pool import MIN_PAGED
from policies.policies import CASES, SHAPES, Case

several = settings(max_examples=100, deadline=None)
CODES = [
    Linear(127), Linear(7), Linear(7, "stochastic"), Linear(63), Linear(127, "stochastic"), Linear(30, norm="l2"),
    Linear(90, "stochastic", "l2"), ScaledSign(), Float8(), Float8("e5m2"), Float8(rounding="stochastic"),
    Float8("e5m2", "stochastic"),
]  # fmt: skip
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    2.0**-126,
    3e38,
    -3.4028235e38,
    1.0,
    -127.0,
    0.5,
    2.5,
    math.inf,
    -math.inf,
    math.nan,
]
Both = Callable[[Callable[[], Any]], tuple[Any, Any]]


def both(work: Callable[[], Any]) -> tuple[Any, Any]:
    """What it gives with native.c and without."""
    assert native._load() is not None, "a C compiler is part of the set-up"
    with pytest.MonkeyPatch.context() as patch:
        ours = work()
        patch.setattr(native, "_load", lambda: None)
        return ours, work()


def bits(x: Tensor) -> list[int]:
    """Of each number; NaN is NaN, whatever its bits."""
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(torch.int32).tolist()  # type: ignore[no-any-return]


def vector(seed: int, numel: int, special: float) -> Tensor:
    """Normal numbers of many magnitudes, some places special."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=draw) * torch.exp(8 * torch.randn(numel, generator=draw))
    where = torch.rand(numel, generator=draw) < special
    chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=draw)]
    return torch.where(where, chosen, x)


def cut(numel: int, width: int) -> Blocks:
    return Blocks([Part(0, numel)], width, numel, "cpu")


def same_codes(both: Both, seed: int, code: Code, width: int, numel: int, special: float) -> None:
    """Coded, and decoded in each way; ``both`` computes with the kernels that are judged and with torch's."""
    blocks, x = cut(numel, width), vector(seed, numel, special)
    (codes, scales), (their_codes, their_scales) = both(lambda: encode(code, x, blocks, seed))
    assert bits(scales) == bits(their_scales)
    finite = scales.isfinite().repeat_interleave(width)[:numel]  # elsewhere any code comes back non-finite
    assert torch.equal(codes[finite], their_codes[finite])
    # Ranks that have either read what either has written, finite or not.
    rows, rates = torch.stack([codes, their_codes, codes.flip(0)]), torch.stack([scales, their_scales, scales.flip(0)])
    for first, add in itertools.product((0, 1), (None, 1, -1)):
        ours, theirs = both(
            lambda i=first, add=add: decode(code, rows[i:], rates[i:], blocks, x.flip(0).contiguous(), add)
        )
        assert bits(ours) == bits(theirs)
        ours, theirs = both(lambda i=first: decode(code, rows[i : i + 1], rates[i : i + 1], blocks))
        assert bits(ours) == bits(theirs)


def same_messages(
    both: Both, seed: int, code: Code, width: int, size: int, numels: list[int], special: float, keep_rest: bool
) -> None:
    """To owners, there added up, and back: messages, what they say, and what they leave."""
    layout = Layout({str(i): (numel,) for i, numel in enumerate(numels)})
    x, y = (vector(seed + i, layout.numel, special) for i in range(2))

    def run() -> list[Tensor]:
        plan = _code_plan(Bucket(x, layout, ranks=Ranks(seed % size, size)), width)
        rests = [x.clone(), y.clone()]
        buffers = torch.empty(2, plan.all_shards.nbytes(code) + 3, dtype=torch.uint8).fill_(0xFF)
        encode = partial(plan.all_shards.encode, code, seed=seed, keep_rest=keep_rest)
        sent = [encode(rest, out=out) for rest, out in zip(rests, buffers, strict=True)]
        theirs = torch.stack([messages[seed % size] for messages in sent])
        total = plan.own_shard.decode(code, theirs, torch.zeros(plan.shards.length))
        update = plan.all_shards.decode(code, sent[0], torch.empty(layout.numel))
        return [total, update, *rests, *sent]

    ours, theirs = both(run)
    for mine, other in zip(ours[:4], theirs[:4], strict=True):
        finite = mine.isfinite()  # a block that is not comes back as anything that is not
        assert torch.equal(finite, other.isfinite())
        assert bits(mine[finite]) == bits(other[finite])
    if x.isfinite().all() and y.isfinite().all():
        assert all(map(torch.equal, ours[4:], theirs[4:]))


@several
@given(st.integers(0, 2**31), st.sampled_from(CODES), st.sampled_from([16, 64, 256, 1024]), st.integers(1, 20_000),
       st.sampled_from([0.0, 0.001, 0.3]))  # fmt: skip
def test_codes(seed: int, code: Code, width: int, numel: int, special: float) -> None:
    same_codes(both, seed, code, width, numel, special)


@several
@given(st.integers(0, 2**31), st.sampled_from([*CODES, PowerOfTwo()]), st.sampled_from([16, 64, 256, 1024]),
       st.integers(1, 5),
       st.lists(st.sampled_from([0, 1, 7, 16, 1000, 1024, 1025, 4096, 9000]), min_size=1, max_size=6),
       st.sampled_from([0.0, 0.001, 0.3]), st.booleans())  # fmt: skip
def test_messages(
    seed: int, code: Code, width: int, size: int, numels: list[int], special: float, keep_rest: bool
) -> None:
    same_messages(both, seed, code, width, size, numels, special, keep_rest)


def test_blocks_that_c_has_no_room_for() -> None:
    assert not Blocks([Part(0, 1)], 2048, 1, "cpu").fits_kernels
    assert Blocks([Part(0, 2**31)], 1024, 2**31, "cpu").fits_kernels
    assert not Blocks([Part(0, 2**31 + 1)], 1024, 2**31 + 1, "cpu").fits_kernels
    x = vector(1, 5000, 0.0)
    for ours, theirs in zip(*both(lambda: encode(Linear(7), x, cut(5000, 2048))), strict=True):
        assert torch.equal(ours, theirs)


@several
@given(st.integers(0, 2**31), st.sampled_from([1, 4, 16, 1024]))
def test_where_blocks_lie(seed: int, width: int) -> None:
    """A table of any parts, in C and by torch's operations, is that of a loop."""
    draw = random.Random(seed)
    parts = []
    for _ in range(draw.randrange(4)):
        start, number, row = draw.randrange(2**40), draw.randrange(2**40), draw.randrange(9)
        if draw.random() < 0.5:
            parts.append(Part(start, draw.choice([0, 1, 15, 16, 1024, 2500]), number, row))
        else:
            size = draw.choice([1024, 2048])
            times, hop, skip = draw.randrange(2, 5), draw.randrange(9999), draw.randrange(9999)
            parts.append(Part(start, size, number, row, times, hop, skip))
    wanted, codes, scales = [], [0] * 9, [0] * 9
    for start, size, number, row, count, hop, skip in parts:
        for part in range(count):
            for at in range(0, size, width):
                elements, first = min(width, size - at), (number + part * skip + at) % 2**32
                wanted.append((start + part * hop + at, elements, row, codes[row], scales[row], first))
                codes[row], scales[row] = codes[row] + elements, scales[row] + 1
    blocks, loaded = Blocks(parts, width, 0, "cpu", 9), native._load()
    assert loaded is not None
    table = blocks.table(loaded)
    ours = torch.cat([table[:, :2].contiguous().view(torch.int64), table[:, 2:6], table[:, 6:7].long() % 2**32], 1)
    assert sorted(map(tuple, ours.tolist())) == sorted(wanted)
    theirs = block_table(blocks.strips, width).t()
    theirs[:, 5] %= 2**32
    assert sorted(map(tuple, theirs.tolist())) == sorted(wanted)
    assert blocks.sorted_table[0].tolist() == sorted(blocks.sorted_table[0].tolist())


def test_dealt_blocks_are_gone_through_in_the_order_of_the_vector() -> None:
    loaded = native._load()
    assert loaded is not None
    dealt = [Part(1024 * row, 1024, 0, row, -(-(7 - row) // 3), 3072, 3072) for row in range(3)]
    blocks = Blocks(dealt, 512, 7 * 1024, "cpu", 3)
    for table in (blocks.table(loaded)[:, [0, 3]], blocks.sorted_table[[0, 2]].t()):
        assert table.tolist() == [[start, start // 1024 % 3] for start in range(0, 7 * 1024, 512)]


@several
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 3), st.integers(0, 200))
def test_packing(seed: int, width: int, rows: int, n: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << width, (rows, n), dtype=torch.uint8, generator=draw)
    ours, theirs = both(lambda: pack.pack(codes, width))
    assert torch.equal(ours, theirs)
    for found in both(lambda: pack.unpack(ours, n, width)):
        assert torch.equal(found, codes)


@several
@given(st.integers(0, 2**62), st.integers(-(2**31), 2**31 - 1001))
def test_hashes(seed: int, first: int) -> None:
    ours, theirs = both(lambda: hashed_bits(torch.arange(first, first + 1000, dtype=torch.int32), seed))
    assert torch.equal(ours, theirs)


@several
@given(st.integers(0, 2**31), st.integers(select.MAX_ROW + 1, 200_000), st.sampled_from([1, 10, 900, 30_000]),
       st.sampled_from([0.0, 0.001, 0.9]))  # fmt: skip
def test_the_largest(seed: int, numel: int, count: int, special: float) -> None:
    x = vector(seed, numel, special)
    plan = select.Plan.of(Layout({"w": (numel,)}), {"w": count}, x.device)
    ours, theirs = both(lambda: select.largest(x, plan))
    assert torch.equal(ours[0], theirs[0])
    assert bits(ours[1]) == bits(theirs[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_policy(case: Case) -> None:
    """Blocks long enough that runs and rows of both kinds are worked on."""
    shapes = SHAPES | {"large.weight": (300, 200)}
    size = max(2, case.min_size)
    draw = torch.Generator().manual_seed(1)
    grads = [{name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} for _ in range(size)]

    def run() -> list[dict[str, Tensor]]:
        simulation = Simulation(case.spec, shapes, size, case.local_size)
        simulation.step([{name: g.clone() for name, g in each.items()} for each in grads])
        return simulation.step(grads)

    for ours, theirs in zip(*both(run), strict=True):
        for name in shapes:
            assert bits(ours[name].reshape(-1)) == bits(theirs[name].reshape(-1))


@several
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 150), st.integers(1, 700), st.integers(1, 6))
def test_products(seed: int, batch: int, rows: int, cols: int, rank: int) -> None:
    """With the product itself each of n additions is off by 2**-24 of what the absolute values add up to."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (rows, cols), (rank, cols), (rank, rows)
    m, q, p = (empty_aligned(batch, *shape, torch.empty(0)).normal_(generator=draw) for shape in shapes)
    for vectors, side, turned in ((q, ROWS, m.mT), (p, COLS, m)):
        exact = vectors.double() @ turned.double()
        bound = (turned.shape[1] + 1) * 2.0**-24 * (vectors.double().abs() @ turned.double().abs())
        assert (project(vectors, m, side) - exact).abs().le(bound).all()
    exact, bound = p.double().mT @ q.double(), rank * 2.0**-24 * (p.double().abs().mT @ q.double().abs())
    made, left = torch.empty_like(m), m.clone()
    add_outer(p, q, list(made.unbind()), 0)
    assert (made - exact).abs().le(bound).all()
    add_outer(p, q, list(left.unbind()), -1)
    assert torch.equal(left, m - made)


@several
@given(st.integers(0, 2**31), st.integers(1, 150), st.integers(1, 3000), st.integers(1, 4), st.sampled_from([0, -1]))
def test_few_vectors_are_added_in_their_order(seed: int, rows: int, cols: int, rank: int, sign: int) -> None:
    """Wherever the matrix lies."""
    draw = torch.Generator().manual_seed(seed)
    p, q = torch.randn(1, rank, rows, generator=draw), torch.randn(1, rank, cols, generator=draw)
    flat = torch.randn(1 + rows * cols, generator=draw)

    def run() -> Tensor:
        there = flat.clone()[1:].view(rows, cols)
        add_outer(p, q, [there], sign)
        return there.flatten()

    ours, theirs = both(run)
    assert bits(ours) == bits(theirs)


@several
@given(st.integers(0, 2**31), st.integers(1, 3000), st.lists(st.floats(0, 1e3), min_size=2, max_size=3), st.booleans())
def test_feedback_adds(seed: int, numel: int, weights: list[float], scaled: bool) -> None:
    if not sum(weights) > 0:
        weights[1] = 1.0
    layout = Layout({"p": (numel,)})
    gradient, residual = vector(seed, numel, 0.01), vector(seed + 1, numel, 0.01)

    def run() -> Tensor:
        bucket = Bucket(gradient.clone(), layout, ranks=Ranks(0, len(weights), tuple(weights)), scaled=scaled)
        made = _corrected(bucket, Views(layout, residual))
        assert (made.scaled, made.needs_sent, made.weighting.weighted) == (True, True, True)
        assert made.spare is bucket.buffer
        return made.buffer

    ours, theirs = both(run)
    assert bits(ours) == bits(theirs)


def forget() -> None:
    """What was found, or not."""
    native._load.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is loaded, and nothing in the cache."""
    monkeypatch.setenv("HVDBRIDGE_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


def test_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvdbridge"):
        assert isinstance(native._load(), ctypes.CDLL)
    assert re.search(r"native\.c took [\d.]+ s to compile", caplog.text)
    (made,) = (fresh / "cache" / "kernels").glob("*.so")
    before = made.stat().st_mtime_ns
    forget()
    monkeypatch.setattr(native.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert isinstance(native._load(), ctypes.CDLL)
    assert made.stat().st_mtime_ns == before


def test_a_cache_that_cannot_be_written(fresh: Path) -> None:
    (fresh / "cache").write_text("a file")
    assert isinstance(native._load(), ctypes.CDLL)


LOADING = """
from contextlib import nullcontext
from hvdbridge.kernels import native
{change}
print("ready", flush=True)
input()
loaded = native._load()
print(loaded and loaded._name)
"""


@pytest.fixture
def outputs(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A compiler that takes a second and fails if the file ``fails`` exists; return the files that it was to write."""
    compiler, log = fresh / "cc", fresh / "log"
    compiler.write_text(
        f"#!/bin/sh\nfor output; do :; done\necho $output >> {log}\nsleep 1\n"
        f'if test -e {fresh}/fails; then echo "error: no header" >&2; exit 1; fi\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    return lambda: log.read_text().splitlines()


def load(first: int, later: int = 0, change: str = "") -> list[tuple[str, str]]:
    """Load the kernels in ``first`` processes at once, then in ``later`` others, all of which were ready before.

    Return what each one has loaded, and its warnings.
    """
    call, pipe = [sys.executable, "-c", LOADING.format(change=change)], subprocess.PIPE
    start = partial(subprocess.Popen, call, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    found = []
    with ExitStack() as stack:
        ranks = [stack.enter_context(start()) for _ in range(first + later)]
        for rank in ranks:
            stack.callback(rank.kill)
        for rank in ranks:
            assert rank.stdout
            assert rank.stdout.readline() == "ready\n"
        for group in (ranks[:first], ranks[first:]):
            for rank in group:
                assert rank.stdin
                rank.stdin.write("now\n")
                rank.stdin.flush()
            found += [rank.communicate(timeout=60) for rank in group]
    return [(out.strip(), warnings) for out, warnings in found]


@pytest.mark.slow
def test_one_process_compiles(fresh: Path, outputs: Callable[[], list[str]]) -> None:
    """Of several that begin at once with an empty cache; all load the same file."""
    found = load(3)
    assert len(outputs()) == 1
    (made,) = (fresh / "cache" / "kernels").glob("*.so")
    assert found == [(str(made), "")] * 3


@pytest.mark.slow
def test_one_failure_of_the_compiler(fresh: Path, outputs: Callable[[], list[str]]) -> None:
    """One process of a node fails to compile. The job's others have its message; a later job tries again."""
    (fresh / "fails").touch()
    found = load(first=2, later=1)
    assert len(outputs()) == 1
    assert [name for name, _ in found] == ["None"] * 3
    for _, warnings in found:
        assert warnings.count("compression takes several times as long") == 1
        assert "error: no header" in warnings
    assert sorted("another process" in warnings for _, warnings in found) == [False, True, True]
    assert load(1)[0][0] == "None"
    assert len(outputs()) == 2
    (fresh / "fails").unlink()
    ((name, warnings),) = load(1)
    assert name.endswith(".so")
    assert not warnings


@pytest.mark.slow
def test_two_processes_write_two_files(fresh: Path, outputs: Callable[[], list[str]]) -> None:
    """As on nodes that share files: their locks have no effect on each other. One complete library remains."""
    found = load(2, change="native._locked = lambda path: nullcontext(path.touch())")
    assert len(set(outputs())) == 2
    (made,) = (fresh / "cache" / "kernels").glob("*[!k]")  # all but the lock
    assert found == [(str(made), "")] * 2


def test_a_damaged_library_is_compiled_again(fresh: Path) -> None:
    """A power failure may leave a file without its contents."""
    made = fresh / "cache" / "kernels" / Path(native.library(fresh / "other")._name).name
    made.parent.mkdir(parents=True)
    made.touch()
    assert isinstance(native._load(), ctypes.CDLL)
    assert made.stat().st_size > 0


def test_waiting_for_the_compiler_has_a_limit(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Another process of the node compiles without end: a warning names the lock, and torch's operations replace C."""
    native.library(fresh / "cache")
    (made,) = (fresh / "cache" / "kernels").glob("*.so")
    made.unlink()
    monkeypatch.setattr(native, "WAIT_SECONDS", 0.2)
    with native._locked(made.with_suffix(".lock")):
        assert native._load() is None
    assert f"TimeoutError: another process has held {made.with_suffix('.lock')} for 0.2 s" in caplog.text
    assert not made.exists()
    forget()
    assert isinstance(native._load(), ctypes.CDLL)


def test_kernels_are_not_kept_where_nodes_share_files(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No network file system can be mounted here. A file in the format of /proc/self/mounts has some."""
    temporary, cache, mounts = fresh / "temporary", fresh / "a cache", fresh / "mounts"
    elsewhere = temporary / f"hvdbridge-{os.getuid()}" / "kernels"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("HVDBRIDGE_CACHE", str(cache))
    assert native._node_folder(Path("/proc/1/cache")) == elsewhere
    assert native._node_folder(cache) == cache / "kernels"
    monkeypatch.setattr(native, "MOUNTS", mounts)
    assert native._node_folder(cache) == elsewhere, "without a list of mounts no file system is known"

    def mount(on_cache: str, on_temporary: str, on_memory: str = "tmpfs") -> None:
        mounts.write_text(
            f"/dev/vda / ext4 rw,relatime 0 0\nserver:/x {fresh}/a\\040cache {on_cache} rw 0 0\n"
            f"x {temporary} {on_temporary} rw 0 0\ntmpfs /dev/shm {on_memory} rw 0 0\n"
        )

    for kind in ("nfs4", "lustre", "fuse.sshfs", "unknown"):
        mount(kind, "unknown")
        assert native._node_folder(cache) == elsewhere
    mount("fuse.fuse-overlayfs", "nfs4")
    assert native._node_folder(cache) == cache / "kernels"
    mount("nfs4", "lustre", "ceph")
    assert native._load() is None
    (warning,) = caplog.messages
    assert "(set HVDBRIDGE_CACHE to a directory of this node; or set HVDBRIDGE_KERNELS=torch)" in warning
    for text in (f"{cache}/kernels is on nfs4, which nodes may share", f"{elsewhere} is on lustre", " is on ceph"):
        assert text in warning
    mount("nfs4", "xfs")
    forget()
    assert isinstance(native._load(), ctypes.CDLL)
    assert len(list(elsewhere.glob("*.so"))) == 1
    forget()
    caplog.clear()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert native._load() is None, "a library that another user may have written is not loaded"
    assert f"{temporary}/hvdbridge-12345 belongs to another user" in caplog.text


NAMESPACE = """
mount -t tmpfs -o {shm} tmpfs /dev/shm
mkdir {folder}/own
mount -t tmpfs -o noexec tmpfs {folder}/own
HVDBRIDGE_CACHE={folder}/own/cache TMPDIR={folder}/own exec {python} -c "{code}"
"""


@pytest.mark.slow
@pytest.mark.parametrize("shm", ["exec", "noexec"])
def test_directories_from_which_nothing_can_be_loaded(shm: str, tmp_path: Path) -> None:
    """Kernels are kept in memory where cache and temporary directory are mounted with noexec."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    if subprocess.run([*unshare, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system in a namespace")
    code = "from hvdbridge.kernels import native; loaded = native._load(); print(loaded and loaded._name)"
    script = NAMESPACE.format(shm=shm, folder=tmp_path, python=sys.executable, code=code)
    done = subprocess.run([*unshare, script], capture_output=True, text=True, timeout=60, check=True)
    if shm == "exec":
        assert re.fullmatch(r"/dev/shm/hvdbridge-0/kernels/native-\w+\.so\n", done.stdout), done.stdout + done.stderr
        assert not done.stderr
    else:
        assert done.stdout == "None\n"
        assert done.stderr.count("is mounted with noexec") == 3
        assert done.stderr.count("set HVDBRIDGE_CACHE to a directory of this node") == 1


@pytest.mark.slow
def test_a_compiler_that_would_change_bits(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast arithmetic, which CC may request and is icx's default, would change results, and flush denormals."""
    monkeypatch.setenv("CC", "cc -ffast-math")
    assert isinstance(native._load(), ctypes.CDLL)
    for seed, (code, width, special) in enumerate(itertools.product(CODES, (16, 1024), (0.0, 0.01))):
        same_codes(both, seed, code, width, 5_003, special)
    assert torch.tensor([1e-45]).mul(2.0).item() > 0


@pytest.mark.slow
def test_libraries_of_a_wheel(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor gets the library of its instruction set, and each library gives the bits of torch's operations."""
    build.prebuild(fresh)
    flags = set(native._processor().split())
    monkeypatch.setattr(build, "SOURCE", fresh / "native.c")
    monkeypatch.setattr(build, "run", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(native, "_processor", lambda: "flags : sse2")
    assert (native._prebuilt(fresh) is None) == build.X86
    for level in build.LEVELS:
        monkeypatch.setattr(native, "_processor", lambda level=level: f"flags : sse2 {' '.join(reversed(level))} avx9")
        if flags.issuperset(level):
            forget()
            loaded = native._load()
            assert loaded is not None
            assert Path(loaded._name) == fresh / f"{'-'.join(['libnative', *level])}.so"
            for seed, (code, width, special) in enumerate(itertools.product(CODES, (16, 1024), (0.0, 0.01))):
                same_codes(both, seed, code, width, 5_003, special)
                same_messages(both, seed, code, width, 3, [1000, 1025, 4096], special, keep_rest=bool(seed % 2))
            for count in (1, 900):
                x = vector(count, 50_021, 0.0)
                plan = select.Plan.of(Layout({"w": (x.numel(),)}), {"w": count}, x.device)
                assert all(map(torch.equal, *both(lambda x=x, plan=plan: select.largest(x, plan))))
            for width in range(1, 8):
                codes = torch.arange(8 * 1001).to(torch.uint8) & (1 << width) - 1
                packed, other = both(lambda width=width, codes=codes: pack.pack(codes, width))
                assert torch.equal(packed, other)


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_no_compiler(compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.INFO, "hvdbridge"):
        assert native.compiled(torch.ones(2)) is None
    assert "torch's operations in place of hvdbridge/kernels/native.c" in caplog.text
    monkeypatch.setenv("HVDBRIDGE_KERNELS", "native")
    forget()
    with pytest.raises(ConfigurationError, match="install a C compiler, or name one in CC, or unset"):
        native.compiled(torch.ones(2))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
@pytest.mark.parametrize("less", ["-mno-avx512f", "-mno-avx2"])
def test_older_processors(less: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written by instructions: without some of them the same elements are found, of each the last one, too."""
    monkeypatch.setenv("CC", f"cc {less}")
    assert isinstance(native._load(), ctypes.CDLL)
    x = vector(1, 50_021, 0.0)
    x[-1] = math.nan
    for count in (1, 900):
        plan = select.Plan.of(Layout({"w": (x.numel(),)}), {"w": count}, x.device)
        ours, theirs = both(lambda plan=plan: select.largest(x, plan))
        assert torch.equal(ours[0], theirs[0])
        assert ours[0][-1] == x.numel() - 1


@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_memory_does_without(kernels: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """What does not compress says no word of a compiler."""
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("HVDBRIDGE_KERNELS", kernels)
    gradients = [{"w": torch.full((MIN_PAGED,), float(i))} for i in range(4)]
    for policy in ("fp16", "mean:exact=true"):
        assert simulate(policy, gradients)[0]["w"].unique().tolist() == [1.5]
    assert not caplog.text


def test_torch_if_told_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDBRIDGE_KERNELS", "torch")
    assert native.compiled(torch.ones(2)) is None
    assert not (fresh / "cache").exists()


def test_words_that_lie_anywhere() -> None:
    codes = torch.arange(2, dtype=torch.uint8).repeat(20)[1:33]
    ours, theirs = both(lambda: pack.pack(codes, 1))
    assert torch.equal(ours, theirs)


def test_processors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for text in ("model name : EPYC\nflags : avx2", "model name : EPYC\nflags : avx2 avx512f",
                 "Features : fp asimd\nCPU part : 0xd0c", "Features : fp asimd sve\nCPU part : 0xd40"):  # fmt: skip
        monkeypatch.setattr(Path, "read_text", lambda _, text=text: text)
        found.add(native._processor())
    assert len(found) == 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_default_type(case: Case) -> None:
    """What a user makes torch's default changes nothing."""
    draw = torch.Generator().manual_seed(1)
    size = max(2, case.min_size)
    shapes = {"large.weight": (70, 200), "bias": (200,)}
    grads = [{n: torch.randn(s, generator=draw, dtype=torch.float32) for n, s in shapes.items()} for _ in range(size)]
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            given = {name: torch.zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}
            simulation = Simulation(case.spec, given, size, case.local_size)
            found.append(simulation.step([{name: g.clone() for name, g in each.items()} for each in grads])[0])
        finally:
            torch.set_default_dtype(torch.float32)
    for name in shapes:
        assert bits(found[0][name].reshape(-1)) == bits(found[1][name].float().reshape(-1))


@pytest.mark.parametrize("spec", ["int8", "int4", "onebit", "efsign:exact=true", "qsgd", "terngrad", "sign", "topk",
                                  "threshold:value=1.0", "randomk", "oktopk", "dgc"])  # fmt: skip
def test_another_default_device(spec: str) -> None:
    draw = torch.Generator().manual_seed(1)
    grads = [{"w": torch.randn(90_000, generator=draw), "b": torch.randn(5, generator=draw)} for _ in range(2)]
    found = []
    for device in ("cpu", "meta"):
        simulation = Simulation(spec, {"w": torch.zeros(90_000), "b": torch.zeros(5)}, 2)
        candidates._points.cache_clear()
        with torch.device(device):
            found.append(simulation.step([{n: each[n].clone() for n in each} for each in grads])[0])
    assert all(torch.equal(found[0][name], found[1][name]) for name in grads[0])


def test_only_for_what_lies_as_expected() -> None:
    assert native.compiled(torch.ones(4, 4)) is not None
    assert native.compiled(torch.ones(4, 4).t()) is None
    assert native.compiled(torch.ones(4, device="meta")) is None
    assert native.compiled(torch.ones(4, dtype=torch.float64)) is None


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8)


@several
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=9), st.randoms(),
       st.sampled_from(DTYPES))  # fmt: skip
def test_runs_move_what_they_name_and_nothing_else(
    gaps: list[tuple[int, int, int]], random: Any, dtype: torch.dtype
) -> None:
    """(gap here, gap there, length), there in any order."""
    lengths, there, at = [length for _, _, length in gaps], {}, 0
    for i in random.sample(range(len(gaps)), len(gaps)):
        there[i], at = at + gaps[i][1], at + gaps[i][1] + lengths[i]
    here, end, runs = 0, at, []
    for i, (gap, _, length) in enumerate(gaps):
        runs.append((here + gap, there[i], length))
        here += gap + length
    given = torch.arange(1, here + 3).to(dtype)
    expected, back = [0.0] * (end + 3), [0.0] * (here + 2)
    for a, b, length in runs:
        expected[b : b + length] = given[a : a + length].tolist()
        back[a : a + length] = given[a : a + length].tolist()
    for found in both(lambda: Runs(runs).to(given, given.new_zeros(end + 3))):
        assert found.tolist() == expected
        for again in both(lambda message=found: Runs(runs).back(given.new_zeros(here + 2), message)):
            assert again.tolist() == back
    wide = Runs(runs).to(given, torch.zeros(end + 3, dtype=torch.float64))  # of two types: torch's operations
    assert wide.tolist() == expected


def test_runs_beyond_a_vector_are_refused() -> None:
    """As an update of a user's policy that is too short for its part of a partition."""
    runs = Runs([(0, 0, 3), (5, 3, 3)])
    for here, there in ((8, 5), (7, 6)):
        with pytest.raises(RuntimeError, match="split"):
            runs.to(torch.zeros(here), torch.zeros(there))
        with pytest.raises(RuntimeError, match="split"):
            runs.back(torch.zeros(here), torch.zeros(there))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_many_small_pieces_are_dealt_as_few_large_ones(size: int, wire: torch.dtype) -> None:
    """Every operation of :class:`BlockShards`, in one pass and by views; the blocks of "large" have several owners."""
    torch.manual_seed(size)
    shapes = {f"p{i}": (i % 50,) for i in range(200)} | {"large": (40, 300)} | {f"q{i}": (7,) for i in range(30)}
    layout = Layout(shapes)
    shards = BlockShards(layout, {name: 13 * i for i, name in enumerate(layout.names)}, size)
    assert layout.numel < SHORT * len(shards.groups)
    flat, row = torch.randn(layout.numel), torch.randn(shards.length)
    rows = torch.randn(size, shards.length).to(wire)

    def changed(change: Callable[[Tensor], None]) -> Tensor:
        copy = flat.clone()
        change(copy)
        return copy

    for work in (
        lambda: shards.pack(flat, wire),
        lambda: shards.pack(flat, wire, 4.0),
        lambda: shards.owned(flat, size - 1),
        lambda: changed(lambda copy: shards.add_owned(copy, 0, row)),
        lambda: changed(lambda copy: shards.subtract(copy, rows, 4.0)),
        lambda: shards.unpack(rows, torch.float32),
        lambda: shards.unpack(rows, torch.float64, torch.empty(layout.numel, dtype=torch.float64)),
    ):
        ours, theirs = both(work)
        assert torch.equal(ours, theirs)
    assert torch.equal(shards.unpack(shards.pack(flat, torch.float32), torch.float32), flat)
