"""Goes through Horovod's whole operation API and compares with numbers that are worked out here."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import torch

import hvdbridge.torch as hvd
from hvdbridge.torch.exceptions import DuplicateNameError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def raises(kind: type[BaseException], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was expected")


def equal(actual: torch.Tensor, expected: Any) -> None:
    expected = torch.as_tensor(expected)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert torch.equal(actual, expected), (actual, expected)


def check_before_init() -> None:
    assert not hvd.is_initialized()
    for query in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size):
        assert raises(ValueError, query) == "Horovod has not been initialized; use hvd.init()."
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1)))
    raises(ValueError, lambda: hvd.start_timeline("/dev/null"))
    raises(ValueError, lambda: hvd.add_process_set([0]))
    assert hvd.global_process_set.process_set_id == 0


def check_queries() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.is_initialized()
    assert 0 <= rank < size
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous() is True
    mpi = os.environ["HVDBRIDGE_BACKEND"] == "mpi"
    assert hvd.mpi_enabled() == mpi
    assert hvd.gloo_enabled() != mpi
    assert hvd.mpi_built() in (True, False)
    assert hvd.gloo_built() is True
    assert [hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()] == [False] * 3
    assert isinstance(hvd.nccl_built(), int)
    assert isinstance(hvd.cuda_built(), bool)
    if mpi:
        assert hvd.mpi_threads_supported() in (True, False)
    else:
        raises(ValueError, hvd.mpi_threads_supported)
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.rank() == rank
    assert hvd.global_process_set.size() == size
    assert hvd.global_process_set.included()
    hvd.init()  # again: harmless


def check_allreduce() -> None:
    rank, size = hvd.rank(), hvd.size()
    values = [3, 1, 2, 5][:size]
    reductions = {hvd.Sum: sum(values), hvd.Min: min(values), hvd.Max: max(values)}
    product = 1
    for value in values:
        product *= value
    reductions[hvd.Product] = product
    for dtype, (op, expected) in itertools.product(FLOATS + INTS, reductions.items()):
        mine = torch.full((3, 2), values[rank], dtype=dtype)
        equal(hvd.allreduce(mine, op=op), torch.full((3, 2), expected, dtype=dtype))
        equal(mine, torch.full((3, 2), values[rank], dtype=dtype))
    for dtype in FLOATS:
        expected = torch.full((2,), sum(values), dtype=dtype).mul_(1 / size)
        equal(hvd.allreduce(torch.full((2,), values[rank], dtype=dtype)), expected)
    for dtype in INTS:  # Horovod cuts off
        expected = torch.full((2,), int(sum(values) * (1 / size)), dtype=dtype)
        equal(hvd.allreduce(torch.full((2,), values[rank], dtype=dtype), op=hvd.Average), expected)
    flags = torch.tensor([rank == 0, True, False])
    for op, expected in {hvd.Sum: [True, True, False], hvd.Min: [False, True, False]}.items():
        equal(hvd.allreduce(flags, op=op), expected)
    raises(ValueError, lambda: hvd.allreduce(flags, op=hvd.Average))
    equal(hvd.allreduce(torch.full((2,), 1 + 2j), op=hvd.Sum), torch.full((2,), size * (1 + 2j)))


def check_forms() -> None:
    """Scalars, empty, strided and expanded tensors, in place, names, both spellings of the op."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2
    equal(hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum), float(total))
    equal(hvd.allreduce(torch.empty(0, 3), op=hvd.Sum), torch.empty(0, 3))
    strided = (torch.arange(6.0).view(2, 3) + rank).t()
    equal(hvd.allreduce(strided, op=hvd.Sum), (torch.arange(6.0).view(2, 3) * size + total).t())
    equal(hvd.allreduce(torch.tensor(1.0).expand(4), op=hvd.Sum), torch.full((4,), float(size)))
    for tensor in (torch.full((4,), float(rank)), torch.zeros(4, 2)[:, 0].fill_(rank), torch.tensor(float(rank))):
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert torch.equal(tensor, torch.full_like(tensor, total))
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    equal(parameter.detach(), torch.full((2,), float(total)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = lambda average: hvd.allreduce(torch.ones(2), average=average)  # noqa: E731
        equal(call(False), torch.full((2,), float(size)))
        equal(call(True), torch.ones(2))
    assert [each.category for each in caught] == [DeprecationWarning] * 2
    here = (__file__, call.__code__.co_firstlineno)
    assert [(each.filename, each.lineno) for each in caught] == [here] * 2, "the warning points at the caller"
    raises(ValueError, lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum))
    raises(ValueError, lambda: hvd.allreduce(torch.ones(2), op=9))
    raises(ValueError, lambda: hvd.allreduce_(torch.tensor(1.0).expand(4)))
    raises(ValueError, lambda: hvd.allreduce(torch.ones(2).to_sparse()))
    for lazy in (torch.full((2,), 1 + 2j).conj(), torch.full((2,), 1 + 2j).conj().imag):
        assert "clone()" in raises(ValueError, lambda lazy=lazy: hvd.allgather(lazy))
    assert pickle.loads(pickle.dumps(hvd.Max)) is hvd.Max
    handle = hvd.allreduce_async(torch.ones(3), name="asynchronous", op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(0.001)
    equal(hvd.synchronize(handle), torch.full((3,), float(size)))
    assert hvd.synchronize(handle) is None
    raises(ValueError, lambda: hvd.poll(handle))


def check_factors() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))
    for dtype in FLOATS:
        mine = torch.full((3,), rank + 1, dtype=dtype)
        equal(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5), torch.full((3,), total * 0.5, dtype=dtype))
        equal(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.5), torch.full((3,), total * 0.5, dtype=dtype))
        expected = torch.full((3,), total, dtype=dtype).mul_(0.25 / size)
        equal(hvd.allreduce(mine, op=hvd.Average, postscale_factor=0.25), expected)
    cut = sum(int((value + 1) * 0.5) for value in range(size))
    equal(hvd.allreduce(torch.tensor([rank + 1]), op=hvd.Sum, prescale_factor=0.5), [cut])
    large = torch.tensor([40000.0])  # the sum overflows float16 before it is divided, as under Horovod
    assert torch.isinf(hvd.allreduce(large, compression=hvd.Compression.fp16)).all()
    small = torch.full((4,), 1.0 + rank / 8)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        expected = sum(1.0 + other / 8 for other in range(size)) / size
        equal(hvd.allreduce(small, compression=compression), torch.full((4,), expected))
    equal(hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, compression=hvd.Compression.fp16), [sum(range(size))])


def check_adasum() -> None:
    rank, size = hvd.rank(), hvd.size()
    vectors = [torch.tensor([1.0, 0.0, 2.0]) * (each + 1) + each for each in range(size)]

    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dot = (a * b).sum()
        return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b

    level = [each.double() for each in vectors]
    while len(level) > 1:
        level = [pair(*each) for each in zip(level[::2], level[1::2], strict=True)]
    mine = vectors[rank].clone()
    torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Adasum), level[0].float())
    equal(mine, vectors[rank])
    assert hvd.allreduce_(mine, op=hvd.Adasum) is mine
    torch.testing.assert_close(mine, level[0].float())
    zeros = hvd.grouped_allreduce([torch.zeros(2), vectors[rank]], op=hvd.Adasum)
    equal(zeros[0], torch.zeros(2))
    torch.testing.assert_close(zeros[1], level[0].float())


def check_order() -> None:
    """Names match whatever the order; running numbers count for each kind; many at once are fused."""
    rank, size = hvd.rank(), hvd.size()
    names = [f"tensor{number}" for number in range(20)]
    order = names[rank:] + names[:rank]
    handles = {
        name: hvd.allreduce_async(torch.full((int(name[6:]) + 1,), float(rank)), name=name, op=hvd.Sum)
        for name in order
    }
    for name in names:
        equal(hvd.synchronize(handles[name]), torch.full((int(name[6:]) + 1,), float(sum(range(size)))))
    first = [lambda: hvd.allreduce_async(torch.ones(2), op=hvd.Sum), lambda: hvd.allgather_async(torch.ones(1))]
    both = [call() for call in (first if rank % 2 else reversed(first))]
    results = [hvd.synchronize(handle) for handle in both]
    for result, expected in zip(results if rank % 2 else reversed(results), (size, 1.0), strict=True):
        assert (result == expected).all()
    sources = [hvd.broadcast_async_(torch.full((3,), float(rank)), root, name=f"root{root}") for root in range(size)]
    for root, handle in enumerate(sources):
        equal(hvd.synchronize(handle), torch.full((3,), float(root)))


def check_grouped() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = [torch.full((n,), float(rank + n)) for n in range(1, 4)] + [torch.tensor([rank])]
    expected = [torch.full((n,), float(sum(range(size)) + n * size)) for n in range(1, 4)]
    result = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    assert isinstance(result, list)
    for actual, wanted in zip(result, [*expected, torch.tensor([sum(range(size))])], strict=True):
        equal(actual, wanted)
    handle = hvd.grouped_allreduce_async(tensors[:3], op=hvd.Sum)
    assert isinstance(done := hvd.synchronize(handle), tuple)
    assert len(done) == 3
    copies = [tensor.clone() for tensor in tensors[:3]]
    for actual, copy, wanted in zip(hvd.grouped_allreduce_(copies, op=hvd.Sum), copies, expected, strict=True):
        assert actual is copy
        equal(copy, wanted)
    copies = [tensor.clone() for tensor in tensors[:3]]
    given = list(copies)
    handle = hvd.grouped_allreduce_async_(given, op=hvd.Sum)
    given.reverse()  # the caller may use the list for something else
    for actual, copy, wanted in zip(hvd.synchronize(handle), copies, expected, strict=True):
        assert actual is copy
        equal(copy, wanted)
    compressed = hvd.grouped_allreduce(tensors[:2], compression=hvd.Compression.fp16, op=hvd.Sum)
    equal(compressed[1], expected[1])
    third = torch.full((rank + 2, 3), 10 * rank)
    rows = hvd.grouped_allgather([torch.full((rank + 1, 2), rank), torch.full((2 - rank % 2,), float(rank)), third])
    equal(rows[2], torch.cat([torch.full((other + 2, 3), 10 * other) for other in range(size)]))
    equal(rows[0], torch.cat([torch.full((other + 1, 2), other) for other in range(size)]))
    equal(rows[1], torch.cat([torch.full((2 - other % 2,), float(other)) for other in range(size)]))
    parts = hvd.grouped_reducescatter([torch.ones(size * 2, 2), torch.ones(size)], op=hvd.Sum)
    equal(parts[0], torch.full((2, 2), float(size)))
    equal(parts[1], torch.full((1,), float(size)))
    for grouped in (hvd.grouped_allreduce_async, hvd.grouped_allreduce, hvd.grouped_reducescatter):
        raises(ValueError, lambda grouped=grouped: grouped([]))


def check_allgather() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*FLOATS, *INTS, torch.bool, torch.complex64):
        same = hvd.allgather(torch.full((2, 3), rank % 2, dtype=dtype))
        equal(same, torch.cat([torch.full((2, 3), other % 2, dtype=dtype) for other in range(size)]))
        uneven = hvd.allgather(torch.full((rank * 2, 3), rank % 2, dtype=dtype))
        equal(uneven, torch.cat([torch.full((other * 2, 3), other % 2, dtype=dtype) for other in range(size)]))
    equal(hvd.allgather(torch.empty(0, 2)), torch.empty(0, 2))
    equal(hvd.allgather(torch.arange(4).view(2, 2).t()), torch.arange(4).view(2, 2).t().repeat(size, 1))
    mine = torch.ones(1)
    gathered = hvd.allgather(mine)
    gathered.zero_()
    equal(mine, torch.ones(1))
    text = raises(hvd.HorovodInternalError, lambda: hvd.allgather(torch.tensor(1.0)))
    assert "rank-zero tensor" in text, text


def check_broadcast() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype, root in itertools.product((*FLOATS, *INTS, torch.bool, torch.complex64), range(size)):
        mine = torch.full((2, 2), (rank + 1) % 2, dtype=dtype)
        wanted = torch.full((2, 2), (root + 1) % 2, dtype=dtype)
        equal(hvd.broadcast(mine, root), wanted)
        equal(mine, torch.full((2, 2), (rank + 1) % 2, dtype=dtype))
        assert hvd.broadcast_(mine, root) is mine
        equal(mine, wanted)
    equal(hvd.broadcast(torch.tensor(rank), 1), 1)
    strided = torch.full((2, 3), float(rank)).t()
    hvd.broadcast_(strided, 0)
    equal(strided, torch.zeros(3, 2))
    equal(hvd.broadcast(torch.empty(0), 0), torch.empty(0))
    assert "root rank" in raises(ValueError, lambda: hvd.broadcast(torch.ones(1), size))


def check_alltoall() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = torch.tensor([[rank, to] for to in range(size) for _ in range(2)], dtype=torch.int64)
    even = hvd.alltoall(rows)
    equal(even, torch.tensor([[source, rank] for source in range(size) for _ in range(2)]))
    splits = [to + rank for to in range(size)]
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        values = torch.cat([torch.full((count, 2), 10.0 * rank + to) for to, count in enumerate(splits)])
        result, received = hvd.alltoall(values, splits=given, name="splits")
        equal(received, torch.tensor([rank + source for source in range(size)], dtype=torch.int32))
        equal(result, torch.cat([torch.full((rank + source, 2), 10.0 * source + rank) for source in range(size)]))
    output, received = hvd.synchronize(hvd.alltoall_async(torch.full((size,), rank, dtype=torch.uint8)))
    equal(output, torch.arange(size, dtype=torch.uint8))
    equal(received, torch.ones(size, dtype=torch.int32))
    nothing, received = hvd.alltoall(torch.ones(3), splits=[0] * size)
    assert nothing.shape == (0,)
    equal(received, torch.zeros(size, dtype=torch.int32))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(size + 1)))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(3), splits=[1] * (size + 1)))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(1), splits=[1] * size))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(9), splits=torch.ones(size)))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(9), splits=torch.ones(size, 1, dtype=torch.int32)))


def check_reducescatter() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in FLOATS + INTS:
        whole = torch.arange(size * 2, dtype=dtype).unsqueeze(1).repeat(1, 3)
        mine = slice(rank * 2, rank * 2 + 2)
        equal(hvd.reducescatter(whole, op=hvd.Sum), whole[mine] * size)
        equal(hvd.reducescatter(whole), whole[mine])
        if dtype.is_floating_point:
            equal(hvd.reducescatter(whole, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0), whole[mine] * size)
    uneven = torch.arange(size + 1.0)
    expected = uneven[:2] if rank == 0 else uneven[rank + 1 : rank + 2]
    equal(hvd.reducescatter(uneven, op=hvd.Sum), expected * size)
    equal(
        hvd.synchronize(hvd.reducescatter_async(torch.ones(1, 2), op=hvd.Sum)),
        torch.full((int(rank == 0), 2), 1.0 * size),
    )
    raises(ValueError, lambda: hvd.reducescatter(torch.tensor(1.0)))
    raises(hvd.HorovodInternalError, lambda: hvd.reducescatter(torch.ones(size), op=hvd.Max))


def check_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = float(sum(range(1, size + 1)))
    weight = rank + 1.0

    def gradient(call: Callable[[torch.Tensor], torch.Tensor], *shape: int, fill: float = 1.0) -> torch.Tensor:
        leaf = torch.full(shape, fill, requires_grad=True)
        (call(leaf) * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    equal(gradient(lambda t: hvd.allreduce(t, op=hvd.Sum), 2), torch.full((2,), total))
    equal(gradient(lambda t: hvd.allreduce(t), 2), torch.full((2,), total / size))
    equal(gradient(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5), 2), torch.full((2,), total / 2))
    best = gradient(lambda t: hvd.allreduce(t, op=hvd.Max), 2, fill=float(rank))
    equal(best, torch.full((2,), total if rank == size - 1 else 0.0))
    tied = gradient(lambda t: hvd.allreduce(t, op=hvd.Min), 2)
    torch.testing.assert_close(tied, torch.full((2,), total / size))
    twos = gradient(lambda t: hvd.allreduce(t, op=hvd.Product), 2, fill=2.0)
    equal(twos, torch.full((2,), total * 2.0 ** (size - 1)))
    pair = gradient(lambda t: sum(hvd.grouped_allreduce([t, t * 2], op=hvd.Sum)), 2)
    equal(pair, torch.full((2,), total * 3))
    equal(gradient(lambda t: hvd.allgather(t, name="rows"), rank + 1, 2), torch.full((rank + 1, 2), total / size))
    equal(gradient(lambda t: hvd.grouped_allgather([t])[0], rank + 1, 2), torch.full((rank + 1, 2), total / size))
    root = gradient(lambda t: hvd.broadcast(t, 1), 3)
    equal(root, torch.full((3,), total / size if rank == 1 else 0.0))
    splits = [1] * size
    sent = gradient(lambda t: hvd.alltoall(t, splits=splits)[0], size + 1)
    equal(sent, torch.tensor([*(other + 1.0 for other in range(size)), 0.0]))
    equal(gradient(hvd.alltoall, size), torch.tensor([other + 1.0 for other in range(size)]))
    scattered = gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum), size)
    equal(scattered, torch.tensor([size * (other + 1.0) for other in range(size)]))
    averaged = gradient(lambda t: hvd.grouped_reducescatter([t])[0], size + 1)
    equal(averaged, torch.tensor([1.0, *(other + 1.0 for other in range(size))]))
    # Twice through one graph, and through two operations of one name.
    leaf = torch.full((2,), 1.0, requires_grad=True)
    output = hvd.allreduce(hvd.allreduce(leaf, op=hvd.Sum, name="same"), op=hvd.Sum, name="same")
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    equal(leaf.grad, torch.full((2,), 2.0 * size * size))


def check_sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.sparse_coo_tensor(
        torch.tensor([[rank, 0]]), torch.tensor([1.0, 2.0]), (size + 1,), check_invariants=True
    )
    for op, share in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / size)):
        handle = hvd.sparse_allreduce_async(mine, name="sparse", op=op)
        expected = torch.ones(size + 1)
        expected[0] += 2.0 * size
        expected[size] = 0.0
        assert callable(handle)
        torch.testing.assert_close(hvd.synchronize(handle).to_dense(), expected * share)
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (3,), check_invariants=True)
    equal(hvd.sparse_allreduce_async(empty, "none", hvd.Sum)().to_dense(), torch.zeros(3))


def check_process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    evens = hvd.add_process_set(hvd.ProcessSet(range(0, size, 2)))
    odds = hvd.add_process_set(list(range(1, size, 2)))
    mine, others = (odds, evens) if rank % 2 else (evens, odds)
    assert (evens.process_set_id, odds.process_set_id) == (1, 2)
    assert mine.included()
    assert not others.included()
    members = mine.ranks
    assert mine.size() == len(members)
    assert mine.rank() == members.index(rank)
    raises(ValueError, others.rank)
    equal(hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=mine, name="same name"), sum(members))
    equal(hvd.allreduce(torch.tensor([1.0 * rank]), process_set=mine), torch.tensor([sum(members) / len(members)]))
    equal(hvd.allgather(torch.tensor([rank]), process_set=mine), torch.tensor(members))
    equal(hvd.broadcast(torch.tensor(rank), members[-1], process_set=mine), members[-1])
    equal(hvd.alltoall(torch.full((len(members),), rank), process_set=mine), torch.tensor(members))
    equal(hvd.reducescatter(torch.ones(len(members)), op=hvd.Sum, process_set=mine), torch.tensor([1.0 * len(members)]))
    assert hvd.broadcast_object(rank, members[0], process_set=mine) == members[0]
    leaf = torch.ones(2, requires_grad=True)
    hvd.broadcast(leaf, members[0], process_set=mine).sum().backward()
    equal(leaf.grad, torch.full((2,), float(rank == members[0])))  # the root's place in the set is not its rank
    assert hvd.allgather_object(rank, process_set=mine) == members
    hvd.barrier(process_set=mine)
    assert "not a member" in raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=others))
    raises(ValueError, lambda: hvd.broadcast(torch.ones(1), others.ranks[0], process_set=mine))
    raises(ValueError, lambda: hvd.add_process_set([0, size]))
    raises(ValueError, lambda: hvd.add_process_set(list(range(size))))
    raises(ValueError, lambda: hvd.add_process_set(range(0, size, 2)))
    raises(ValueError, lambda: hvd.ProcessSet(["a"]))
    raises(NotImplementedError, lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=mine))
    # Unnamed operations of a set do not disturb the running numbers of the others.
    for _ in range(rank % 2 + 1):
        hvd.allreduce(torch.ones(1), process_set=mine)
    equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([1.0 * size]))
    # Sets that overlap, in another order on each rank.
    mixed = [pair for pair in itertools.combinations(range(size), 2) if sum(pair) % 2 and size > 2]
    pairs = [hvd.add_process_set(pair) for pair in mixed]
    joint = [pair for pair in pairs if pair.included()]
    handles = [
        (pair, hvd.allreduce_async(torch.tensor(rank), op=hvd.Sum, process_set=pair))
        for pair in (joint if rank % 2 else reversed(joint))
    ]
    for pair, handle in handles:
        equal(hvd.synchronize(handle), sum(pair.ranks))
    for each in (evens, odds):
        assert hvd.remove_process_set(each)
        assert each.process_set_id is None
        assert each.size() is None
        assert not hvd.remove_process_set(each)
    assert not hvd.remove_process_set(hvd.global_process_set)
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=evens))
    assert hvd.add_process_set(range(0, size, 2)).process_set_id == 3 + len(pairs)


def check_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"rank": rank} if rank == 1 else None, root_rank=1) == {"rank": 1}
    assert hvd.broadcast_object_fn(root_rank=1, name="fn")(rank) == 1
    long = hvd.allgather_object(["x"] * rank * 100, name="lists")
    assert [len(each) for each in long] == [other * 100 for other in range(size)]
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for params in (model.state_dict(), list(model.named_parameters()), model.named_parameters(), model.parameters()):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank + 1.0)
        hvd.broadcast_parameters(params, root_rank=0)
        assert all((parameter == 1.0).all() for parameter in model.parameters())
    raises(ValueError, lambda: hvd.broadcast_parameters("weights", root_rank=0))


def check_optimizer_state() -> None:
    rank = hvd.rank()
    kinds = [
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1 * (rank + 1), betas=(0.5 + rank / 10, 0.9), weight_decay=0.1),
        lambda p: torch.optim.Adadelta(p, lr=0.1 * (rank + 1)),
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1)),
    ]
    for kind, stepped in itertools.product(kinds, ("all", "root", "none")):
        model = torch.nn.Linear(2, 2)
        optimizer = kind(model.parameters())
        if stepped == "all" or (stepped == "root" and rank == 0):
            (model(torch.full((1, 2), rank + 1.0)).sum()).backward()
            optimizer.step()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if stepped != "none":
            for parameter, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter, old), "parameters do not move, not on ranks without state either"
        everyone = hvd.allgather_object(optimizer.state_dict())
        assert everyone[0]["param_groups"][0]["lr"] == 0.1
        for other in everyone[1:]:
            assert other["param_groups"] == everyone[0]["param_groups"]
            assert str(other["state"]) == str(everyone[0]["state"])
        if kind is not kinds[-1]:  # plain SGD keeps nothing
            assert len(everyone[0]["state"]) == 2
    raises(ValueError, lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0))


def check_join() -> None:
    """Uneven numbers of steps; twice, since a join ends and everything goes on."""
    rank, size = hvd.rank(), hvd.size()
    for _ in range(2):
        for step in range(rank + 1):
            active = [other for other in range(size) if other >= step]
            equal(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum), float(len(active)))
            equal(
                hvd.allreduce(torch.full((2,), float(size)), name=f"mean{step}"), torch.full((2,), float(len(active)))
            )
            grouped = hvd.grouped_allreduce([torch.ones(2), torch.ones(1, dtype=torch.int64)], op=hvd.Sum)
            equal(grouped[1], torch.tensor([len(active)]))
        last = hvd.join()
        assert last in range(size)
        assert len(set(hvd.allgather_object(last))) == 1, "the same on all ranks"
    if rank == 0:
        assert hvd.join() == size - 1  # the others come later
    else:
        text = raises(hvd.HorovodInternalError, lambda: hvd.allgather(torch.ones(1), name="while joined"))
        assert "Allgather is not supported with Join" in text, text
        assert "rank 0" in text
        raises(hvd.HorovodInternalError, lambda: hvd.broadcast(torch.ones(1), 1))
        others = list(range(1, size))
        equal(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, name="after"), float(len(others)))
        if rank == size - 1:
            time.sleep(0.3 if size == 2 else 3.0)
        assert hvd.join() == size - 1
    equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([1.0 * size]))


def check_mismatches() -> None:
    rank, size = hvd.rank(), hvd.size()
    odd = rank == size - 1
    cases: dict[str, tuple[Callable[[], Any], list[str]]] = {
        "shape": (lambda: hvd.allreduce(torch.ones(3 + odd), name="m"), ["shapes", "[3]", "[4]"]),
        "rank": (lambda: hvd.allreduce(torch.ones([1] * (1 + odd)), name="m"), ["shapes", "[1]", "[1, 1]"]),
        "dtype": (
            lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32 if odd else torch.float32), name="m"),
            ["data types", "int32", "float32"],
        ),
        "op": (lambda: hvd.allreduce(torch.ones(3), op=hvd.Max if odd else hvd.Sum, name="m"), ["Max", "Sum"]),
        "adasum": (lambda: hvd.allreduce(torch.ones(3), op=hvd.Adasum if odd else hvd.Sum, name="m"), ["operations"]),
        "factor": (
            lambda: hvd.allreduce(torch.ones(3), prescale_factor=2.0 if odd else 1.0, name="m"), ["factors", "2.0"],
        ),
        "root": (lambda: hvd.broadcast(torch.ones(3), int(odd), name="m"), ["root ranks", "0", "1"]),
        "broadcast": (lambda: hvd.broadcast(torch.ones(3 + odd), 0, name="m"), ["broadcast tensor shapes"]),
        "gather": (lambda: hvd.allgather(torch.ones(2, 3 + odd), name="m"), ["allgather tensor shapes", "[*, 3]"]),
        "dims": (lambda: hvd.allgather(torch.ones([2] * (1 + odd)), name="m"), ["allgather tensor shapes"]),
        "alltoall": (lambda: hvd.alltoall(torch.ones(size, 3 + odd), name="m"), ["alltoall tensor shapes"]),
        "scatter": (lambda: hvd.reducescatter(torch.ones(size + odd), name="m"), ["reducescatter tensor shapes"]),
        "group": (lambda: hvd.grouped_allreduce([torch.ones(1)] * (2 + odd), name="m"), ["numbers of tensors"]),
    }  # fmt: skip
    for case, (call, words) in cases.items():
        text = raises(hvd.HorovodInternalError, call)
        assert "Mismatched" in text, (case, text)
        assert f"rank {size - 1}" in text, (case, text)
        for word in words:
            assert word in text, (case, text)
        assert len(set(hvd.allgather_object(text))) == 1, "the same text on every rank"
    handles = [hvd.allreduce_async(torch.ones(1 + (odd and number == 1)), name=f"n{number}") for number in range(3)]
    raises(hvd.HorovodInternalError, lambda: hvd.synchronize(handles[1]))
    for handle in (handles[0], handles[2]):  # only the one that differs fails
        equal(hvd.synchronize(handle), torch.ones(1))
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        text = raises(ValueError, lambda: hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum))
        assert "in flight" in text
        raises(DuplicateNameError, lambda: hvd.allreduce_async(torch.ones(2), name="twice"))
        raises(hvd.HorovodInternalError, lambda: hvd.allreduce_async(torch.ones(2), name="twice"))
    hvd.barrier()
    if rank != 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    equal(hvd.synchronize(handle), torch.full((2,), float(size)))
    equal(hvd.allreduce(torch.ones(2), name="twice", op=hvd.Sum), torch.full((2,), float(size)))


def check_real_horovod_catches() -> None:
    if os.environ["HVDBRIDGE_BACKEND"] != "horovod":
        return
    from horovod.common.exceptions import HorovodInternalError

    raises(HorovodInternalError, lambda: hvd.allreduce(torch.ones(1 + hvd.rank()), name="m"))


def check_timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(3), name="traced")
        hvd.allgather(torch.ones(3), name="rows")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(3), name="untraced")
        if hvd.rank() != 0:
            assert not path.exists()
            return
        text = path.read_text()
        for word in ("allreduce.traced", "start_time_since_epoch_in_micros", "NEGOTIATE_ALLGATHER", "CYCLE_START"):
            assert word in text, text
        assert "untraced" not in text
        spans = [event for event in json.loads(text) if event["ph"] == "X"]
        assert {span["name"] for span in spans} == {
            f"{n}{k}" for n in ("", "NEGOTIATE_") for k in ("ALLREDUCE", "ALLGATHER")
        }
        assert all(span["dur"] >= 0 for span in spans)


def check_barrier() -> None:
    if hvd.rank() == 0:
        time.sleep(0.3)
    entered = time.monotonic()  # one clock for all processes of a host
    hvd.barrier()
    times = hvd.allgather_object((entered, time.monotonic()))
    assert max(entered for entered, _ in times) <= min(left for _, left in times), times


def check_again() -> None:
    """shutdown and init once more in the same process, with process sets."""
    size = hvd.size()
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    raises(ValueError, hvd.rank)
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1)))
    both = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=both)
    assert [each.process_set_id for each in both] == [1, 2]
    equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([1.0 * size]))
    if hvd.rank() < 2:
        equal(hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum, process_set=both[hvd.rank()]), hvd.rank())
    raises(NotImplementedError, lambda: (hvd.shutdown(), hvd.init(comm=[0])))
    hvd.init(comm=list(range(size)), process_sets="dynamic")
    hvd.shutdown()


def main() -> None:
    check_before_init()
    hvd.init()
    rank = hvd.rank()
    for check in CHECKS:
        try:
            check()
        except Exception:
            print(f"rank {rank}: {check.__name__} failed", flush=True)
            raise
    jobs.record(rank, [check.__name__ for check in CHECKS])


CHECKS = [
    check_queries, check_allreduce, check_forms, check_factors, check_adasum, check_order, check_grouped,
    check_allgather, check_broadcast, check_alltoall, check_reducescatter, check_gradients, check_sparse,
    check_process_sets, check_objects, check_optimizer_state, check_join, check_mismatches,
    check_real_horovod_catches, check_timeline, check_barrier, check_again,
]  # fmt: skip

if __name__ == "__main__":
    main()
