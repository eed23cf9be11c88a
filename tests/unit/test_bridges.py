"""Bridges without processes: what is accepted, what a hook sees, and its mathematics in a simulation."""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from torch.futures import Future

import hvdbridge as hb
from hvdbridge.execution.scheduler import drive
from hvdbridge.policies import from_spec, label
from hvdbridge.policy.bucket import Layout
from hvdbridge.policy.collectives import AllGather, AllReduce
from hvdbridge.training.fiber import execute, flow_of
from hvdbridge.training.foreign_hook import GradBucket, name_of

GRADS = [
    {"w": torch.randn(6, 5, generator=torch.Generator().manual_seed(r)), "b": torch.ones(5) * r} for r in (1, 2, 3)
]


def copies(size: int) -> list[dict[str, Tensor]]:
    return [{name: tensor.clone() for name, tensor in grads.items()} for grads in GRADS[:size]]


def mean(size: int) -> dict[str, Tensor]:
    return {name: torch.stack([grads[name] for grads in GRADS[:size]]).mean(0) for name in GRADS[0]}


# -- Hooks ------------------------------------------------------------------------------------------------------------


def test_who_runs_per_bucket_and_who_per_step() -> None:
    both = default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    assert hb.from_comm_hook(None, both).scope == "bucket"
    assert hb.from_comm_hook(None, default_hooks.fp16_compress_wrapper(powerSGD_hook)).scope == "step"
    assert hb.from_comm_hook(None, lambda state, bucket: Future()).scope == "step"
    assert hb.from_comm_hook(None, powerSGD_hook, scope="bucket").scope == "bucket"
    partial = functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=64)
    assert name_of(partial) == "quantization_perchannel_hook"
    assert label(hb.from_comm_hook(None, partial)) == "from_comm_hook(quantization_perchannel_hook, scope='step')"


@pytest.mark.parametrize(
    "hook",
    [
        optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, None),
        default_hooks.fp16_compress_wrapper(optimizer_overlap_hooks._hook_then_optimizer(powerSGD_hook, None)),
    ],
)
def test_a_hook_that_steps_the_optimizer_is_refused(hook: Any) -> None:
    with pytest.raises(hb.Unsupported, match="it steps"):
        hb.from_comm_hook(None, hook)


def test_a_hook_of_zero_redundancy_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it imports its functional optimizers
        from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    with pytest.raises(hb.Unsupported, match="ZeroRedundancyOptimizer"):
        hb.from_comm_hook(None, hook_with_zero_step)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="in this order"):
        hb.from_comm_hook(default_hooks.allreduce_hook, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'bucket', 'step'"):
        hb.from_comm_hook(None, default_hooks.allreduce_hook, scope="layer")  # type: ignore[arg-type]


def test_what_a_hook_sees() -> None:
    layout = Layout({"w": (2, 3), "b": (3,)})
    flat = torch.arange(9.0)
    bucket = GradBucket(flat, layout, [torch.zeros(2, 3), torch.zeros(3)], 4, False)
    assert (bucket.index(), bucket.is_last(), len(bucket.parameters())) == (4, False, 2)
    bucket.gradients()[1].fill_(7)
    assert bucket.buffer().tolist() == [0, 1, 2, 3, 4, 5, 7, 7, 7]
    bucket.set_buffer(flat.half())
    assert [g.dtype for g in bucket.gradients()] == [torch.float16] * 2
    assert {name for name in dir(dist.GradBucket) if not name.startswith("_")} <= set(dir(bucket))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fp16_and_bf16_by_their_formula(size: int) -> None:
    for hook, dtype in (
        (default_hooks.fp16_compress_hook, torch.float16),
        (default_hooks.bf16_compress_hook, torch.bfloat16),
    ):
        found = hb.simulate(hb.from_comm_hook(None, hook), copies(size))[0]
        for name in GRADS[0]:
            total = sum((grads[name].to(dtype) / size).float() for grads in GRADS[:size])
            # of at most three terms below 4 in size each sum is rounded once or twice
            torch.testing.assert_close(
                found[name], total, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
            )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_per_tensor_by_torchs_own_quantisation(size: int) -> None:
    found = hb.simulate(hb.from_comm_hook(None, quantization_hooks.quantization_pertensor_hook), copies(size))
    total = torch.zeros(35)
    for grads in GRADS[:size]:
        flat = torch.cat([grads["w"].flatten(), grads["b"]])
        low, high = min(flat.min().item(), 0.0), max(flat.max().item(), 0.0)
        scale = (high - low) / 255
        total += torch.fake_quantize_per_tensor_affine(flat, scale, round(-low / scale), 0, 255)
    # where g / scale lies within a rounding of a half, the two may take neighbours: one step of the coarsest scale
    step = max((g["w"].max() - g["w"].min()).item() for g in GRADS) / 255
    for rank in found:
        difference = torch.cat([rank["w"].flatten(), rank["b"]]) - total / size
        assert difference.abs().max() <= 1.01 * step
        assert (difference.abs() < 1e-6).sum() >= 30


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("hook", "rank"), [(powerSGD_hook, 5), (batched_powerSGD_hook, 6)])
def test_power_sgd_of_full_rank_is_the_mean(hook: Any, rank: int, size: int) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=0.1)
    simulation = hb.Simulation(hb.from_comm_hook(state, hook), {n: t.shape for n, t in GRADS[0].items()}, size)
    for _ in range(4):
        for update in simulation.step(copies(size)):
            for name, wanted in mean(size).items():
                torch.testing.assert_close(
                    update[name], wanted, rtol=0, atol=1e-5
                )  # some 30 roundings of values below 4
    assert state.iter == 4, "the first rank's state is the one that was given"


def test_weights_are_multiples_of_the_mean_weight() -> None:
    policy = hb.from_comm_hook(None, default_hooks.allreduce_hook)
    found = hb.simulate(policy, copies(2), weights=[3.0, 1.0])[1]
    for name in GRADS[0]:
        wanted = 0.75 * GRADS[0][name] + 0.25 * GRADS[1][name]
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-6)
    hidden = copies(2)
    hidden[1]["w"].fill_(float("nan"))
    found = hb.simulate(policy, hidden, weights=[1.0, 0.0])[0]
    assert torch.equal(found["w"], GRADS[0]["w"])


def collectives(state: Any, bucket: Any) -> Future[Tensor]:
    """All that a hook may call, with what it must give."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.is_initialized()
    assert (dist.group.WORLD.rank(), dist.group.WORLD.size()) == (rank, size)
    mine = torch.tensor([1.0 + rank])
    rows = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(rows, mine)
    assert [row.item() for row in rows] == [1.0 + r for r in range(size)]
    assert mine.item() == 1.0 + rank
    flat = torch.zeros(size)
    dist.distributed_c10d._get_default_group()._allgather_base(flat, mine).wait()  # renamed in torch 2.13
    assert flat.tolist() == [1.0 + r for r in range(size)]
    dist.broadcast(mine, src=size - 1)
    assert mine.item() == size
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)
    assert mine.item() == size
    dist.reduce(mine, dst=0)
    assert mine.item() == (size * size if rank == 0 else size)
    out = torch.zeros(1)
    dist.reduce_scatter(out, [torch.full((1,), float(r)) for r in range(size)])
    assert out.item() == size * rank
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.MAX
    dist.distributed_c10d._get_default_group()._reduce_scatter_base(out, torch.arange(float(size)), options).wait()
    assert out.item() == rank
    dist.all_to_all_single(flat, torch.arange(float(size)) + 10 * rank)
    assert flat.tolist() == [rank + 10.0 * r for r in range(size)]
    dist.scatter(out, [torch.full((1,), 5.0 + r) for r in range(size)] if rank == 1 else None, src=1)
    assert out.item() == 5 + rank
    dist.gather(out, rows if rank == 1 else None, dst=1)
    assert rank != 1 or [row.item() for row in rows] == [5.0 + r for r in range(size)]
    dist.barrier()
    with pytest.raises(hb.Unsupported, match="send and recv"):
        dist.send(out, (rank + 1) % size)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work.wait()
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_a_hook(size: int) -> None:
    found = hb.simulate(hb.from_comm_hook(None, collectives), copies(size))
    for name, wanted in mean(size).items():
        torch.testing.assert_close(found[0][name], wanted * size, rtol=0, atol=1e-5)
    assert not dist.is_initialized(), "outside of the hook nothing has changed"


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (lambda state, bucket: bucket.buffer(), "returns a torch.futures.Future"),
        (lambda state, bucket: Future(), "not complete"),
        (lambda state, bucket: done(bucket.buffer()[1:]), "34.* for a bucket of 35"),
        (lambda state, bucket: done("text"), "gave str"),
    ],
)
def test_what_a_hook_must_return(hook: Any, text: str) -> None:
    with pytest.raises(hb.Unsupported, match=text):
        hb.simulate(hb.from_comm_hook(None, hook), copies(2))


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_an_error_of_a_hook_keeps_its_line() -> None:
    def broken(state: Any, bucket: Any) -> Future[Tensor]:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer") as caught:
        hb.simulate(hb.from_comm_hook(None, broken), copies(2))
    assert any(entry.name == "broken" for entry in caught.traceback)


def test_noop_stays_local() -> None:
    found = hb.simulate(hb.from_comm_hook(None, debugging_hooks.noop_hook), copies(2))
    for rank, grads in enumerate(GRADS[:2]):
        assert torch.equal(found[rank]["w"], grads["w"])


# -- Fibers -----------------------------------------------------------------------------------------------------------


def test_blocking_code_is_a_flow() -> None:
    def code() -> list[float]:
        assert not torch.is_grad_enabled()
        first = execute(AllReduce(torch.ones(1)))
        return execute(AllGather(first + 1)).flatten().tolist()

    flow = flow_of(code)
    request = next(flow)
    assert isinstance(request, AllReduce)
    request = flow.send(torch.tensor([5.0]))
    assert request.tensor.tolist() == [6.0]
    with pytest.raises(StopIteration) as end:
        flow.send(torch.tensor([[6.0], [7.0]]))
    assert end.value.value == [6.0, 7.0]


def test_an_error_of_an_answer_reaches_the_code() -> None:
    def careful() -> str:
        try:
            execute(AllReduce(torch.ones(1)))
        except OSError:
            return "mended"
        return "fine"

    def cut(request: Any) -> Tensor:
        raise OSError("wire cut")

    assert drive(flow_of(careful), cut) == "mended"


def test_an_abandoned_flow_ends_its_code() -> None:
    left = []

    def code() -> None:
        try:
            execute(AllReduce(torch.ones(1)))
        finally:
            left.append(True)

    flow = flow_of(code)
    next(flow)
    flow.close()
    assert drive(flow_of(lambda: 3), lambda request: request.tensor) == 3  # hand-overs still work
    end = time.monotonic() + 5
    while not left and time.monotonic() < end:
        time.sleep(0.01)
    assert left


def test_another_thread_cannot_ask() -> None:
    with pytest.raises(hb.Unsupported, match="thread that called the hook"):
        execute(AllReduce(torch.ones(1)))


# -- Compressions -----------------------------------------------------------------------------------------------------


class Half:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_compression_sums_first_and_scales_after(size: int) -> None:
    found = hb.simulate(hb.from_horovod_compression(Half), copies(size))
    total = GRADS[0]["w"].half()
    for grads in GRADS[1:size]:
        total = total + grads["w"].half()
    wanted = total.div(size).float()
    # three terms may be added in float32 and rounded once: one unit of half's last place of a sum below 16
    torch.testing.assert_close(found[0]["w"], wanted, rtol=0, atol=0 if size < 3 else 16 * 2**-11)
    assert found[0]["w"].dtype is torch.float32
    assert label(hb.from_horovod_compression(Half)) == "from_horovod_compression(Half)"


def test_a_compression_must_be_one() -> None:
    with pytest.raises(ValueError, match="no compress and no decompress"):
        hb.from_horovod_compression(object())

    class Cut(Half):
        @staticmethod
        def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            return tensor[:1]

    with pytest.raises(hb.Unsupported, match="decompressed 'w'"):
        hb.simulate(hb.from_horovod_compression(Cut), copies(2))


def test_one_all_reduce_is_a_compression() -> None:
    made = hb.to_horovod_compression("mean")
    sent, contexts = zip(*(made.compress(grads["w"]) for grads in GRADS[:2]), strict=True)
    average = (sent[0] + sent[1]) / 2
    assert torch.equal(made.decompress(average, contexts[0]), mean(2)["w"])
    assert torch.equal(GRADS[0]["w"], copies(1)[0]["w"]), "the gradient itself is left alone"


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("ef(bf16)", "keeps state"),
        ("bf16", "AllToAll|asks for nothing"),
        ("mean:exact=true", "AllToAll|asks for nothing"),
        ("post_local_sgd", "acts after"),
        ("sum", "would be the mean"),
        ("warmup(steps=10, then=sum)", "number of the step"),
        ("randomk:ef=false", "number of the step"),
        ("powersgd:ef=false,warm_start=false", "number of the step|second round"),
        ("powersgd:rank=64,ef=false,warm_start=false", "second round"),
        ("partition(1d=int8, rest=mean)", "AllToAll"),
        ("partition(<10000=mean, rest=randomk(ef=false))", "number of the step"),
        ("partition(*.bias=sum, rest=mean)", r"names for \*\.bias"),
    ],
)
def test_other_policies_are_no_compressions(policy: str, why: str) -> None:
    with pytest.raises(hb.Unsupported, match=why):
        hb.to_horovod_compression(policy)


def test_a_policy_of_hooks_composes() -> None:
    """A hook in a wrapper of ours."""
    from hvdbridge.policies.wrappers import Warmup

    policy = Warmup(hb.from_comm_hook(None, default_hooks.allreduce_hook), steps=1, first=from_spec("mean"))
    simulation = hb.Simulation(policy, {n: t.shape for n, t in GRADS[0].items()}, 2)
    for _ in range(2):
        for name, wanted in mean(2).items():
            torch.testing.assert_close(simulation.step(copies(2))[0][name], wanted, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="additive"):
        from_spec("ef(mean)").__class__(hb.from_comm_hook(None, default_hooks.allreduce_hook))
