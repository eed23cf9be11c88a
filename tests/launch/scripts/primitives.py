"""Every primitive, in groups and without, against what it means; records the digest of each result."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from jobs import record
from torch import Tensor

import hvdbridge as hb

hb.init()
RANK, SIZE = hb.rank(), hb.size()
OTHERS = [rank for rank in range(SIZE) if rank != RANK]
LAST = SIZE - 1
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool,
)  # fmt: skip


def of(rank: int, shape: tuple[int, ...] = (5, 3), dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rank ``rank``'s tensor, which every rank can make."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 11, shape, generator=generator).to(dtype)


def digest(*tensors: Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:12]


def equal(found: Tensor, wanted: Tensor, message: Any = "") -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=lambda text: f"{message}: {text}")


def broadcast() -> str:
    for dtype, root in itertools.product(DTYPES, {0, LAST}):
        tensor = of(RANK, dtype=dtype)
        assert hb.broadcast(tensor, src=root) is None
        equal(tensor, of(root, dtype=dtype), (dtype, root))
    turned = of(RANK).t()
    hb.broadcast(turned, 0)
    equal(turned, of(0).t())
    parameter = torch.nn.Parameter(of(RANK))
    hb.broadcast(parameter, 0)
    equal(parameter.detach(), of(0))
    waves = torch.complex(of(RANK), of(RANK, seed=1))
    hb.broadcast(waves, LAST)
    equal(waves, torch.complex(of(LAST), of(LAST, seed=1)))
    for shape in ((), (0,), (1,)):
        tensor = of(RANK, shape)
        hb.broadcast(tensor, 0)
        equal(tensor, of(0, shape))
    return "right"


def folded(tensors: list[Tensor], op: str) -> Tensor:
    wide = torch.stack([tensor.to(torch.float64) if tensor.is_floating_point() else tensor for tensor in tensors])
    if op in ("SUM", "AVG"):
        total = wide.sum(0)
        return total / len(tensors) if op == "AVG" else total
    if op == "PRODUCT":
        return wide.prod(0)
    return wide.amin(0) if op == "MIN" else wide.amax(0)


def all_reduce() -> str:
    found = []
    for dtype, op in itertools.product(DTYPES, hb.ReduceOp):
        sums = op.name in ("SUM", "AVG", "PRODUCT")
        if (dtype is torch.bool and sums) or (op is hb.ReduceOp.AVG and not dtype.is_floating_point):
            with pytest.raises(hb.Unsupported):
                hb.all_reduce(of(RANK, dtype=dtype), op)
            continue
        tensor = of(RANK, (7, 3), dtype)
        assert hb.all_reduce(tensor, op=op) is None
        wanted = folded([of(rank, (7, 3), dtype) for rank in range(SIZE)], op.name)
        if dtype.is_floating_point and sums:
            # SIZE - 1 additions or products and one division, each rounded once, of values whose sum is below 16
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(tensor, wanted.to(dtype), rtol=SIZE * eps, atol=SIZE * eps * 16)
        else:
            equal(tensor, wanted.to(dtype), (dtype, op))
        if SIZE == 2:  # one addition, in either order
            found.append(digest(tensor))
    tensor = of(RANK)
    hb.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    equal(tensor, folded([of(rank) for rank in range(SIZE)], "MAX").float())
    waves = torch.complex(of(RANK), of(RANK, seed=1))
    hb.all_reduce(waves, hb.ReduceOp.AVG)
    for part, seed in ((waves.real, 0), (waves.imag, 1)):
        wanted = folded([of(rank, seed=seed) for rank in range(SIZE)], "AVG").float()
        eps = torch.finfo(torch.float32).eps
        torch.testing.assert_close(part, wanted, rtol=SIZE * eps, atol=SIZE * eps * 16)
    return " ".join(found)


def reduce() -> str:
    for root in (0, LAST):
        tensor = of(RANK, dtype=torch.int32)
        hb.reduce(tensor, dst=root)
        if root == RANK:
            equal(tensor, folded([of(rank, dtype=torch.int32) for rank in range(SIZE)], "SUM").int())
        else:
            equal(tensor, of(RANK, dtype=torch.int32))
    return "right"


def gather_and_scatter() -> str:
    for dtype in DTYPES:
        everyone = [of(rank, dtype=dtype) for rank in range(SIZE)]
        rows = [torch.empty(5, 3, dtype=dtype) for _ in range(SIZE)]
        hb.all_gather(rows, of(RANK, dtype=dtype))
        for row, wanted in zip(rows, everyone, strict=True):
            equal(row, wanted)
        joined = torch.empty(5 * SIZE, 3, dtype=dtype)
        hb.all_gather_into_tensor(joined, of(RANK, dtype=dtype))
        equal(joined, torch.cat(everyone))
        stacked = torch.empty(SIZE, 5, 3, dtype=dtype)
        hb.all_gather_into_tensor(stacked, of(RANK, dtype=dtype))
        equal(stacked, torch.stack(everyone))
        rows = [torch.empty(5, 3, dtype=dtype) for _ in range(SIZE)] if RANK == LAST else None
        hb.gather(of(RANK, dtype=dtype), rows, dst=LAST)
        for row, wanted in zip(rows or (), everyone, strict=False):
            equal(row, wanted)
        part = torch.empty(5, 3, dtype=dtype)
        hb.scatter(part, everyone if RANK == 0 else None)
        equal(part, everyone[RANK])
    return "right"


def reduce_scatter() -> str:
    blocks = [[of(rank, (4,), torch.int64, seed=i) for i in range(SIZE)] for rank in range(SIZE)]
    wanted = torch.stack([blocks[rank][RANK] for rank in range(SIZE)]).sum(0)
    output = torch.empty(4, dtype=torch.int64)
    hb.reduce_scatter(output, blocks[RANK])
    equal(output, wanted)
    output = torch.empty(4, dtype=torch.int64)
    hb.reduce_scatter_tensor(output, torch.cat(blocks[RANK]))
    equal(output, wanted)
    mean = torch.empty(4, dtype=torch.float64)
    hb.reduce_scatter_tensor(mean, torch.stack(blocks[RANK]).double(), op=hb.ReduceOp.AVG)
    equal(mean, wanted.double() / SIZE)
    return "right"


def all_to_all() -> str:
    def between(source: int, target: int) -> Tensor:
        return of(source, (1 + source + 2 * target, 2), seed=target)

    outputs = [torch.empty(1 + rank + 2 * RANK, 2) for rank in range(SIZE)]
    hb.all_to_all(outputs, [between(RANK, rank) for rank in range(SIZE)])
    for rank, output in enumerate(outputs):
        equal(output, between(rank, RANK))
    sizes = [1 + RANK + 2 * rank for rank in range(SIZE)]
    theirs = [1 + rank + 2 * RANK for rank in range(SIZE)]
    output = torch.empty(sum(theirs), 2)
    hb.all_to_all_single(output, torch.cat([between(RANK, rank) for rank in range(SIZE)]), theirs, sizes)
    equal(output, torch.cat([between(rank, RANK) for rank in range(SIZE)]))
    output = torch.empty(2 * SIZE)
    hb.all_to_all_single(output, torch.arange(2.0 * SIZE) + 100 * RANK)
    equal(output, torch.cat([torch.tensor([2.0, 3.0]) + 2 * RANK - 2 + 100 * rank for rank in range(SIZE)]))
    return "right"


def asynchronous() -> str:
    tensors = [of(RANK, (2000,), seed=i) for i in range(6)]
    handles = [hb.all_reduce(tensor, async_op=True) for tensor in tensors]
    rows = torch.empty(SIZE, 3)
    handles.append(hb.all_gather_into_tensor(rows, torch.full((3,), float(RANK)), async_op=True))
    for handle in handles:
        assert handle.wait(timedelta(seconds=30)) is True
        assert handle.is_completed()
        assert handle.wait()
    for i, tensor in enumerate(tensors):
        wanted = torch.stack([of(rank, (2000,), seed=i) for rank in range(SIZE)]).sum(0)
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=2 * SIZE * 6e-8 * 8)
    equal(rows, torch.arange(SIZE).float()[:, None].expand(SIZE, 3))
    hb.barrier(async_op=True).wait()
    return digest(*tensors) if SIZE == 2 else "right"


def groups() -> str:
    pairs = [hb.new_group([a, b]) for a, b in itertools.combinations(range(SIZE), 2)]
    alone = [hb.new_group([rank]) for rank in range(SIZE)]
    everyone = hb.new_group()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for group in pairs:
            tensor = torch.tensor([1.0 + RANK])
            assert hb.all_reduce(tensor, group=group) is None
            assert tensor.item() == (sum(1 + rank for rank in group.ranks) if RANK in group.ranks else 1 + RANK)
            tensor = torch.tensor([RANK])
            hb.broadcast(tensor, src=group.ranks[1], group=group)
            assert tensor.item() == (group.ranks[1] if RANK in group.ranks else RANK)
            tensor = torch.tensor([RANK])
            hb.broadcast(tensor, group_src=1, group=group)
            assert tensor.item() == (group.ranks[1] if RANK in group.ranks else RANK)
            hb.barrier(group)
    outside = sum(RANK not in group.ranks for group in pairs)
    assert len([w for w in caught if "not in the group" in str(w.message)]) == 4 * outside
    assert [group.rank() for group in pairs] == [g.ranks.index(RANK) if RANK in g.ranks else -1 for g in pairs]
    assert (everyone.rank(), everyone.size(), alone[RANK].size()) == (RANK, SIZE, 1)
    tensor = torch.tensor([5.0])
    hb.all_reduce(tensor, group=alone[RANK])
    assert tensor.item() == 5.0
    # Groups do not wait for each other: the world's operation is over although another's partner has not come.
    if SIZE > 2:
        first = next(group for group in pairs if group.ranks == (0, 1))
        mine = torch.ones(1)
        handle = hb.all_reduce(mine, group=first, async_op=True) if RANK == 0 else None
        hb.all_reduce(torch.ones(1), group=everyone)
        if RANK == 1:
            hb.all_reduce(mine, group=first)
        if handle is not None:
            handle.wait()
        assert mine.item() == (2.0 if RANK < 2 else 1.0)
    for group in pairs:
        if RANK in group.ranks:
            exchange_in(group)
    return "right"


def exchange_in(group: Any) -> None:
    """In each group the same tag and the same pair carry messages of their own."""
    peer = next(rank for rank in group.ranks if rank != RANK)
    outer, inner = torch.tensor([1.0 + RANK]), torch.tensor([10.0 + RANK])
    handles = [hb.isend(outer, peer, tag=3), hb.isend(inner, peer, group, tag=3)]
    got = torch.empty(1)
    assert hb.recv(got, peer, group, tag=3) == peer
    assert got.item() == 10 + peer
    hb.recv(got, peer, tag=3)
    assert got.item() == 1 + peer
    for handle in handles:
        handle.wait()


def messages() -> str:
    """Rank 0 and the last rank talk; ranks between them do nothing at all."""
    if RANK not in (0, LAST):
        return "right"
    peer = LAST - RANK
    for i, dtype in enumerate(DTYPES):
        tensor = torch.empty(5, 3, dtype=dtype)
        if RANK == 0:
            assert hb.send(of(0, dtype=dtype), dst=peer, tag=i) is None
        else:
            assert hb.recv(tensor, src=peer, tag=i) == 0
            equal(tensor, of(0, dtype=dtype))
    # tags: received in the other order
    if RANK == 0:
        handles = [hb.isend(torch.full((4,), float(tag)), peer, tag=tag) for tag in range(5)]
        for handle in handles:
            handle.wait()
    else:
        for tag in reversed(range(5)):
            got = torch.empty(4)
            hb.recv(got, peer, tag=tag)
            equal(got, torch.full((4,), float(tag)))
    # one tag: in the order in which they were sent
    if RANK == 0:
        for i in range(20):
            hb.send(torch.tensor([i]), peer, tag=9)
    else:
        got = [torch.empty(1, dtype=torch.int64) for _ in range(20)]
        for tensor in got:
            hb.recv(tensor, peer, tag=9)
        assert [int(tensor) for tensor in got] == list(range(20))
    # both at once, large, not contiguous, a scalar, an empty one
    for shape in ((3_000_001,), (40, 50), (), (0,), (3, 0)):
        mine, got = of(RANK, shape), torch.empty(shape)
        sent = hb.isend(mine.t() if len(shape) == 2 else mine, peer, tag=20)
        hb.irecv(got.t() if len(shape) == 2 else got, peer, tag=20).wait()
        sent.wait()
        equal(got, of(peer, shape))
    ops = [hb.P2POp(hb.isend, of(RANK), peer), hb.P2POp(hb.irecv, into := torch.empty(5, 3), group_peer=peer)]
    assert [op.peer for op in ops] == [op.group_peer for op in ops] == [peer, peer]
    for handle in hb.batch_isend_irecv(ops):
        handle.wait(timedelta(seconds=30))
    equal(into, of(peer))
    threads = threading.active_count()
    many = [hb.irecv(torch.empty(2), peer, tag=tag) for tag in range(100, 130)]
    assert threading.active_count() == threads, "what is not waited for costs no thread"
    hb.irecv(kept := torch.zeros(2), peer, tag=130)  # its handle is dropped, and it arrives before the next
    many += [hb.isend(torch.full((2,), float(tag)), peer, tag=tag) for tag in range(100, 132)]
    hb.recv(torch.empty(2), peer, tag=131)
    equal(kept, torch.full((2,), 130.0))
    for handle in many:
        handle.wait()
    return "right"


def from_anyone() -> str:
    if RANK != 0:
        hb.send(torch.tensor([RANK]), 0, tag=7)
        return "right"
    seen = {}
    for _ in OTHERS:
        got = torch.empty(1, dtype=torch.int64)
        source = hb.recv(got, tag=7)
        seen[source] = int(got)
    assert seen == {rank: rank for rank in OTHERS}, seen
    return "right"


def ring() -> str:
    """The all-reduce of the tutorial: each rank sends to its right and receives from its left, SIZE - 1 times."""
    left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    total, travelling = of(RANK, (1000,), torch.int64), of(RANK, (1000,), torch.int64)
    for _ in range(SIZE - 1):
        got = torch.empty_like(travelling)
        handle = hb.isend(travelling, right)
        hb.recv(got, left)
        handle.wait()
        total += got
        travelling = got
    equal(total, torch.stack([of(rank, (1000,), torch.int64) for rank in range(SIZE)]).sum(0))
    return "right"


def timeout() -> str:
    if RANK == 0:
        handle = hb.irecv(torch.empty(1), 1, tag=33)
        assert not handle.is_completed()
        began = time.monotonic()
        with pytest.raises(hb.CollectiveTimeout, match="recv"):
            handle.wait(timedelta(seconds=0.3))
        assert 0.2 < time.monotonic() - began < 30
        hb.send(torch.zeros(1), 1, tag=34)
        handle.wait()
    if RANK == 1:
        hb.recv(torch.empty(1), 0, tag=34)
        hb.send(torch.zeros(1), 0, tag=33)
    return "right"


def limits() -> str:
    """Of a group, and of one barrier; what is over in time does not notice."""
    group = hb.new_group(
        timeout=timedelta(seconds=2), backend=hb.backend(), group_desc="the impatient", device_id=hb.device(),
        ranks=range(SIZE), sort_ranks=False,
    )  # fmt: skip
    hb.barrier(group, device_ids=[0])
    hb.barrier(timeout=timedelta(seconds=30))
    if RANK == 0:
        for wait in (
            lambda: hb.all_reduce(torch.ones(1), group=group),
            lambda: hb.barrier(timeout=timedelta(seconds=0.2)),
        ):
            began = time.monotonic()
            with pytest.raises(hb.CollectiveTimeout, match=r"all_reduce\[1\].*the impatient|barrier"):
                wait()
            assert 0.1 < time.monotonic() - began < 30
        hb.send(torch.zeros(1), LAST, tag=61)
    elif RANK == LAST:
        hb.recv(torch.zeros(1), 0, tag=61)
    if RANK != 0:  # late, but complete: nothing was withdrawn
        handles = [hb.all_reduce(torch.ones(1), group=group, async_op=True), hb.barrier(async_op=True)]
        for handle in handles:
            handle.wait(timedelta(seconds=30))
    return "right"


def signatures() -> str:
    """torch's own names and defaults, in torch's order, as far as this torch has them."""
    for name in (
        "broadcast", "all_reduce", "reduce", "scatter", "gather", "all_gather", "all_gather_into_tensor",
        "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
        "barrier", "new_group", "P2POp", "batch_isend_irecv",
    ):  # fmt: skip
        theirs, ours = (inspect.signature(getattr(of, name)).parameters for of in (torch.distributed, hb))
        assert list(theirs) == [each for each in ours if each in theirs], name
        for each, parameter in theirs.items():
            if each != "op" and parameter.default is not parameter.empty:
                assert ours[each].default == parameter.default, (name, each)
    return "right"


def with_a_synchronizer() -> str:
    """A user's collectives while gradients travel: in hooks of autograd, between buckets."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=1e-5)
    sums = []

    def hook(grad: Tensor) -> None:
        tensor = torch.ones(3)
        hb.all_reduce(tensor)
        sums.append(tensor.sum().item())

    model[2].weight.register_hook(hook)
    for step in range(3):
        sync.optimizer.zero_grad()
        sync.model(of(RANK, (4, 8), seed=step)).square().mean().backward()
        sync.optimizer.step()
    assert sums == [3.0 * SIZE] * 3, sums
    sync.close()
    return "right"


def in_inference_mode() -> str:
    """Tensors made there, which nobody may write outside of it, contiguous and not."""
    with torch.inference_mode():
        for turn in (lambda x: x, lambda x: x.t()):
            everyone = [turn(of(rank, (SIZE, SIZE))) for rank in range(SIZE)]
            mine = everyone[RANK]
            for op in (hb.ReduceOp.SUM, hb.ReduceOp.AVG, hb.ReduceOp.MAX):
                total = turn(of(RANK, (SIZE, SIZE)))
                hb.all_reduce(total, op)
                torch.testing.assert_close(total, folded(everyone, op.name).float())
            copy = turn(torch.empty(SIZE, SIZE))
            hb.broadcast(copy if RANK else mine, 0)
            equal(copy if RANK else mine, everyone[0])
            rows = [turn(torch.empty(SIZE, SIZE)) for _ in range(SIZE)]
            hb.all_gather(rows, mine)
            for row, wanted in zip(rows, everyone, strict=True):
                equal(row, wanted)
            hb.scatter(copy, everyone if RANK == 0 else None)
            equal(copy, mine)
            part = turn(torch.empty(1, SIZE))
            hb.reduce_scatter(part, [turn(torch.ones(1, SIZE))] * SIZE)
            equal(part, torch.full_like(part, SIZE))
            hb.all_to_all(rows, everyone)
            for row in rows:
                equal(row, mine)
            if OTHERS:
                there, back = (RANK + 1) % SIZE, (RANK - 1) % SIZE
                sending = hb.isend(mine, there)
                hb.recv(copy, back)
                sending.wait()
                equal(copy, everyone[back])
    return "right"


def misuse() -> str:
    tensor, waves = torch.ones(3), torch.ones(3, dtype=torch.complex64)
    group = hb.new_group([0])
    bad: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: hb.broadcast(tensor, SIZE), ValueError, "not in the group"),
        (lambda: hb.broadcast(tensor), ValueError, "either"),
        (lambda: hb.broadcast([1.0], 0), TypeError, "takes a tensor, got list"),
        (lambda: hb.broadcast(tensor.to_sparse(), 0), TypeError, "dense"),
        (lambda: hb.all_reduce(tensor, "median"), ValueError, "ReduceOp.SUM"),
        (lambda: hb.all_reduce(tensor, group="world"), TypeError, "new_group"),
        (lambda: hb.all_gather([tensor], tensor) if SIZE > 1 else hb.all_gather([], tensor), ValueError, "list of"),
        (lambda: hb.all_gather([torch.ones(4)] * SIZE, tensor), ValueError, "one shape"),
        (lambda: hb.all_gather_into_tensor(torch.ones(3 * SIZE + 1), tensor), ValueError, "elements"),
        (lambda: hb.gather(tensor, None if RANK == 0 else [tensor] * SIZE), ValueError, "gather_list"),
        (lambda: hb.reduce_scatter_tensor(tensor, torch.ones(3 * SIZE, dtype=torch.int64)), ValueError, "elements"),
        (lambda: hb.all_to_all_single(tensor, tensor, [3] * SIZE, [3] * SIZE), ValueError, "divide"),
        (lambda: hb.send(tensor, RANK), ValueError, "itself"),
        (lambda: hb.send(tensor, OTHERS[0], tag=-1), ValueError, "tag"),
        (lambda: hb.new_group([0, 0]), ValueError, "distinct"),
        (lambda: hb.new_group([SIZE]), ValueError, "distinct"),
        (lambda: hb.new_group(timeout=timedelta(days=1)), TypeError, "HVDBRIDGE_TIMEOUT_SECONDS"),
        (lambda: hb.barrier(timeout=timedelta(days=1)), TypeError, "HVDBRIDGE_TIMEOUT_SECONDS"),
        (
            lambda: hb.new_group(backend="ucc"),
            TypeError,
            rf"backend='ucc'\): this job has {hb.backend()}.*Leave it out",
        ),
        (lambda: hb.new_group(backend="cpu:gloo,cuda:nowhere"), TypeError, "this job has"),
        (lambda: hb.new_group(pg_options=object()), TypeError, "pg_options"),
        (lambda: hb.new_group(use_local_synchronization=True), TypeError, "use_local_synchronization"),
        (lambda: hb.new_group(device_id=torch.device("meta")), TypeError, "device_id=meta"),
        (lambda: hb.new_group(list(range(SIZE))[::-1], sort_ranks=False), TypeError, "sort_ranks"),
        (lambda: hb.P2POp(hb.send, tensor, OTHERS[0]), ValueError, "isend"),
        (lambda: hb.P2POp(hb.isend, tensor), ValueError, "either"),
        (lambda: hb.P2POp(hb.isend, tensor, OTHERS[0], group_peer=OTHERS[0]), ValueError, "either"),
        (lambda: hb.P2POp(hb.isend, [1.0], OTHERS[0]), TypeError, "takes a tensor"),
        (lambda: hb.P2POp(hb.isend, tensor, OTHERS[0], group="world"), TypeError, "new_group"),
        (lambda: hb.all_reduce(waves.conj()), TypeError, "clone"),
        (lambda: hb.all_reduce(torch.ones(1).expand(3)), ValueError, "share memory"),
        (lambda: hb.all_reduce(torch.ones(5).as_strided((3, 3), (1, 1))), ValueError, "share memory"),
        (lambda: hb.all_gather([torch.ones(1).expand(3)] * SIZE, tensor), ValueError, "share memory"),
        (lambda: hb.all_gather_into_tensor(torch.ones(1).expand(3 * SIZE), tensor), ValueError, "share memory"),
        (lambda: hb.reduce_scatter_tensor(tensor[:1].expand(3), torch.ones(3 * SIZE)), ValueError, "share memory"),
        (lambda: hb.all_to_all_single(tensor[:1].expand(2 * SIZE), torch.ones(2 * SIZE)), ValueError, "share memory"),
        (lambda: hb.irecv(torch.ones(1).expand(3), None), ValueError, "share memory"),
        (lambda: hb.all_reduce(waves, hb.ReduceOp.PRODUCT), TypeError, "no meaning for torch.complex64"),
        (lambda: hb.reduce(waves, 0, hb.ReduceOp.MAX), TypeError, "no meaning for torch.complex64"),
        (
            lambda: hb.reduce_scatter(waves, [waves] * SIZE, hb.ReduceOp.MIN), TypeError,
            "no meaning for torch.complex64",
        ),
        (
            lambda: hb.reduce_scatter_tensor(waves, torch.cat([waves] * SIZE), hb.ReduceOp.MAX), TypeError,
            "no meaning for torch.complex64",
        ),
    ]
    for call, error, text in bad:
        with pytest.raises(error, match=text):
            call()
    assert group.size() == 1
    if RANK == 0:
        group.close()
        with pytest.raises(ValueError, match=r"\[0\] is closed"):
            hb.all_reduce(tensor, group=group)
        return "right"

    outside: list[Callable[[], Any]] = [
        lambda: hb.all_reduce(tensor, group=group),
        lambda: hb.isend(tensor, 0, group),
        lambda: hb.send(tensor, 0, group),
        lambda: hb.irecv(tensor, 0, group),
        lambda: hb.recv(tensor, 0, group),
        lambda: hb.batch_isend_irecv([hb.P2POp(hb.isend, tensor, 0, group)]),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [call() for call in outside] == [None, None, None, None, -1, []]
    callers = [(__file__, call.__code__.co_firstlineno) for call in outside]
    assert [(each.filename, each.lineno) for each in caught] == callers, "who called is shown"
    return "right"


def sizes_differ() -> str:
    """Between rank 0 and rank 1, where the carrier can tell."""
    if hb.backend() == "torch" or RANK > 1:
        return "right"
    if RANK == 0:
        hb.send(torch.ones(4), 1, tag=50)
        hb.send(torch.ones(3), 1, tag=51)
        hb.send(torch.ones(2), 1, tag=52)
    else:
        bad, short = hb.irecv(torch.ones(3), 0, tag=50), hb.irecv(torch.ones(3), 0, tag=52)
        while not (bad.is_completed() and short.is_completed()):
            time.sleep(0.001)
        got = torch.zeros(3)
        hb.recv(got, 0, tag=51)
        equal(got, torch.ones(3))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"has (16|more than 12) bytes.* 12"):
                bad.wait()
            with pytest.raises(ValueError, match=r"has 8 bytes.* 12"):
                short.wait()
    return "right"


def next_session() -> str:
    """A handle that outlives its session troubles no message of the next."""
    peer = RANK ^ 1
    handle = hb.irecv(torch.empty(1), peer, tag=70) if peer < SIZE else None
    hb.shutdown()
    del handle
    hb.init()
    if peer < SIZE:
        got = torch.empty(1)
        sent = hb.isend(torch.ones(1), peer)
        hb.recv(got, peer)
        sent.wait()
        assert got == 1
    assert not [each.name for each in threading.enumerate() if each.name.startswith("hvdbridge-messages wait")]
    return "right"


SCENARIOS = [
    messages, broadcast, all_reduce, reduce, gather_and_scatter, reduce_scatter, all_to_all, asynchronous, groups,
    from_anyone, ring, timeout, limits, signatures, with_a_synchronizer, in_inference_mode, misuse, sizes_differ,
    next_session,
]  # fmt: skip

results = {}
chosen = sys.argv[1:]
for scenario in SCENARIOS:
    if chosen and scenario.__name__ not in chosen:
        continue
    try:
        results[scenario.__name__] = scenario()
    except Exception:
        results[scenario.__name__] = traceback.format_exc()
    record(RANK, results)
    hb.barrier()
hb.shutdown()
