"""Every policy on CUDA against the CPU, the kernels against a copy, and what a step waits for. One GPU, no network.

    python benchmarks/cuda_check.py [--json FILE]
    python benchmarks/cuda_check.py --device cpu          # every part that needs no GPU, to check the check

Needs this repository and torch; mpi4py and Horovod if they are there. What is missing is named, row by row, and
fails nothing, nor does what is "slow"; what gives a wrong result fails the whole (exit status 1).

Rules:

1. The CPU's simulation is the reference: the same gradients, the same seeds, the same flows.
2. Two devices add and multiply in another order, and where a value lies between two codes either may be taken. So what
   is compared is the relative error of the whole update, |cuda - cpu| / |cpu|: a float32 sum of few terms differs by
   some 1e-7, an element that falls to the next code by one step of few elements. A wrong kernel is wrong by 1e-1.
3. Every part runs in a process of its own: a device that is left broken ends that part only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hvdbridge as hb
import hvdbridge.torch as hvd
from hvdbridge.backends.bridge import Bridged
from hvdbridge.backends.communicator import DTYPES
from hvdbridge.backends.torch.communicator import OPS, TorchCommunicator
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels import select
from hvdbridge.kernels.blocks import Blocks, Part
from hvdbridge.kernels.codes import Linear
from hvdbridge.kernels.fused import on_cuda
from hvdbridge.kernels.quantise import encode
from hvdbridge.kernels.signs import ScaledSign
from hvdbridge.policies.matrices import COLS, ROWS, aligned, project
from hvdbridge.policies.sharded import _code_plan
from hvdbridge.policy.bucket import Bucket, Layout
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from hvdbridge.startup.network import free_port
from hvdbridge.tools.gpu_kernels import differences

SPECS = [
    "mean", "sum", "fp16", "bf16", "int8", "int4", "fp8", "natural", "qsgd", "terngrad", "topk:ratio=0.05",
    "topk:ratio=0.05,select=exact", "randomk:ratio=0.1", "threshold:value=0.5", "oktopk:ratio=0.05", "dgc:ratio=0.05",
    "sign:momentum=0.9", "efsign", "onebit", "powersgd:rank=2", "powersgd:rank=2,batched=true",
    "powersgd:rank=2,alternate=true", "adasum", "median", "trimmed_mean:f=1", "krum:f=0", "multi_krum:f=0",
    "geometric_median", "clipped_mean", "delayed(int8)", "hierarchical(int8)", "ef(bf16)", "clip(mean)",
    "partition(<100=mean, rest=powersgd(rank=2))", "warmup(steps=1, then=int8)", "dp:norm=1,noise=0", "noop",
    "local_sgd:every=2", "post_local_sgd:start=1,every=2", "diloco:every=2", "adasum_delta",
]  # fmt: skip
IN_STEPS = ["mean", "bf16", "int8", "topk:ratio=0.05", "topk:select=exact", "onebit", "powersgd:rank=2"]
IN_JOBS = [spec for spec in SPECS if "batched" not in spec]
"""All whose result does not depend on how a job's buckets lie, which a simulation cannot know."""
CALLS = ["hvd.allreduce", "hvd.allgather", "hvd.broadcast", "hvd.alltoall", "hvd.reducescatter", "hvd.SyncBatchNorm",
         "hvd.DistributedOptimizer"]  # fmt: skip
SHAPES = {"conv.weight": (32, 16, 3, 3), "fc.weight": (300, 200), "fc.bias": (200,), "scale": ()}
STEPS, RATE = 2, 1e-3
"""Of a job: some policies begin, or have ranks meet, after the first."""
GOAL = 0.7
"""Of the copy's bytes per second, what passes over a vector should reach on a GPU; below it is "slow"."""
FREE = ("top-k 1 %", "P and Q of rank 4")
"""Not only one pass: what was found is searched again; products are bound by arithmetic, too."""
WRONG = 1e-2
"""Relative error from which a result is wrong, see rule 2."""
SIGNS, FLIPS = ("sign:momentum=0.9", "efsign", "onebit"), 2
"""Of these so many elements of a job's update may have the other sign: there each device makes its own gradients."""
WIDTH = 2048
"""Of a wide layer."""
ELEMENTS = 26 * 2**20 // 4
"""Of a bucket of 26 MiB."""
INTERVAL = "cuda_check: what must not wait"
WAITS = re.compile(
    "cuda(Stream|Device|Event)Synchronize|cudaMemcpy|cu(Stream|Ctx|Event)Synchronize|cuMemcpy[DH]to[DH](_v2)?"
)
CYCLES = 4_000_000
"""Of a GPU's clock, 2 to 4 ms: longer than the host takes to hand over a kernel row's operations."""
JOB_SECONDS = 90
"""Of each backend's jobs, which come last."""
SECONDS = 460
"""For all parts: the check takes less than eight minutes, whatever hangs."""


@dataclass(frozen=True)
class Finding:
    """One row: ``verdict`` is ok, WRONG or missing; ``value`` a figure, in the unit that ``detail`` names."""

    part: str
    what: str
    verdict: str
    detail: str
    value: float | None = None


# ------------------------------------------------------------------------------------------- policies


def policies(device: str) -> Iterator[Finding]:
    """Three steps of four simulated ranks on the device and on the CPU."""
    for spec in SPECS:
        try:
            yield compared("policy", spec, run(spec, device), run(spec, "cpu"))
        except Exception as error:
            yield Finding("policy", spec, "WRONG", f"{type(error).__name__}: {error}"[:150])


def run(spec: str, device: str, ranks: int = 4, steps: int = 3) -> list[dict[str, Tensor]]:
    """Rank 0's parameters after each step of plain descent from zeros, on the CPU."""
    found, zeros = [], {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    simulation = hb.Simulation(spec, zeros, ranks, 2)
    params = [zeros] * ranks
    for step in range(steps):
        updates = simulation.step([gradients(rank, step, device) for rank in range(ranks)])
        stepped = [{name: p - mine[name] for name, p in own.items()} for own, mine in zip(params, updates, strict=True)]
        params = simulation.after_step(stepped)
        if simulation.policy.replicas == "same":
            assert all(torch.equal(params[0][name], other[name]) for other in params for name in SHAPES), "ranks differ"
        found.append({name: p.cpu() for name, p in params[0].items()})
    return found


def gradients(rank: int, step: int, device: str) -> dict[str, Tensor]:
    """Drawn on the CPU, whose generator has the same numbers everywhere."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=draw).to(device) for name, shape in SHAPES.items()}


def compared(
    part: str, what: str, found: list[dict[str, Tensor]], reference: list[dict[str, Tensor]], flips: int = 0
) -> Finding:
    """By rule 2; the worst step counts. ``flips`` of elements that are alike in size change an update of n by
    ``2 sqrt(flips / n)``."""
    errors, wrong = [], WRONG
    for mine, theirs in zip(found, reference, strict=True):
        a, b = (torch.cat([t.double().reshape(-1) for t in each.values()]) for each in (mine, theirs))
        errors.append(float((a - b).norm() / b.norm().clamp(min=1e-30)))
        wrong = max(WRONG, 2.01 * math.sqrt(flips / b.numel()))
    right = all(error < wrong for error in errors)  # not a NaN
    return Finding(part, what, "ok" if right else "WRONG", f"relative error {max(errors):.1e}", max(errors))


# ----------------------------------------------------------------------------------------------- jobs


def jobs(device: str) -> Iterator[Finding]:
    """Real jobs: one rank, Gloo with two ranks on the one GPU, MPI, Horovod."""
    available = {"torch": True, "mpi": bool(importlib.util.find_spec("mpi4py")),
                 "horovod": bool(importlib.util.find_spec("horovod"))}  # fmt: skip
    for backend, ranks in (("torch", 1), ("torch", 2), ("mpi", 2), ("horovod", 2)):
        part = f"{backend}, {ranks} rank{'s' * (ranks > 1)}"
        if not available[backend]:
            yield Finding(part, "all", "missing", f"{backend} is not installed")
            continue
        left, deadline = [*CALLS, *IN_JOBS], time.monotonic() + JOB_SECONDS
        while left:
            found, failure = job(backend, ranks, device, left, deadline)
            for spec, parameters in found.items():
                if spec in CALLS:
                    yield Finding(part, spec, "WRONG" if parameters else "ok", parameters[:150] or "as expected")
                elif isinstance(parameters, str):
                    yield Finding(part, spec, "missing", parameters[:150])
                else:
                    mine = {name: torch.tensor(value) for name, value in parameters.items()}
                    yield compared(part, spec, [mine], [reference(spec, ranks)], FLIPS * (spec in SIGNS))
            left = [spec for spec in left if spec not in found]
            if not failure:
                break
            if "BackendUnavailable" in failure:
                yield Finding(part, "all", "missing", failure[-150:])
                break
            yield Finding(part, left.pop(0) if left else "the end", "WRONG", failure[-150:])
            if left and time.monotonic() > deadline:
                yield Finding(part, "the rest", "WRONG", f"no time is left of {JOB_SECONDS} s")
                break
            # What follows one that failed, in a job of its own


def job(backend: str, ranks: int, device: str, specs: Sequence[str], deadline: float) -> tuple[dict[str, Any], str]:
    """Start ranks by bare variables; what rank 0 printed for each policy, and why there is no more."""
    env = os.environ | {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "HVDBRIDGE_BACKEND": backend,
    }  # fmt: skip
    line = [sys.executable, __file__, "--part", "rank", "--device", device, "--specs", *specs]
    typed = [
        subprocess.Popen(
            line, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    late = ""
    outputs = []
    for process in typed:
        try:
            outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            late = f"no end after {JOB_SECONDS} s"
            process.kill()
            outputs.append(process.communicate()[0])
    lines = outputs[0].splitlines()
    found: dict[str, Any] = {}
    for text in lines:  # among warnings of libraries
        if text.startswith("{"):
            found |= json.loads(text)
    failed = late or any(process.returncode for process in typed)
    said = " ".join(text for text in lines if not text.startswith("{"))
    return found, (late or said or "it ended without a word") if failed or not found else ""


def net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50)).to(device)


def batch(rank: int) -> Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(rank))


def rank(device: str, specs: Sequence[str]) -> None:
    """What is wrong with each call; or some steps under each policy, and how far every parameter went."""
    hvd.init()
    for spec in specs:
        if spec in CALLS:
            wrong = called(spec, str(hb.device()) if device == "cuda" else "cpu")
            if hb.rank() == 0:
                print(json.dumps({spec: wrong}), flush=True)
            continue
        model = net(str(hb.device()) if device == "cuda" else "cpu")
        at_first = [p.detach().clone() for p in model.parameters()]
        try:
            with at_first[0].device:
                sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=RATE), policy=spec)
        except ConfigurationError as error:  # of a policy that so few ranks cannot have: on all of them
            found: Any = str(error)
        else:
            x = batch(hb.rank()).to(at_first[0].device)
            with at_first[0].device:  # as many scripts have it, by torch.set_default_device
                for _ in range(STEPS):
                    sync.optimizer.zero_grad()
                    sync.model(x).square().sum().backward()
                    sync.optimizer.step()
            went = zip(model.named_parameters(), at_first, strict=True)
            found = {name: (p.detach() - first).cpu().tolist() for (name, p), first in went}
            sync.close()
        if hb.rank() == 0:
            print(json.dumps({spec: found}), flush=True)
    hb.barrier()
    hvd.shutdown()


def called(name: str, device: str) -> str:
    """What differs from what numbers on the CPU say, on whichever rank."""
    rank, ranks = hb.rank(), range(hb.size())
    own = [torch.arange(12.0).view(4, 3) * (r + 1) for r in ranks]
    total, x = torch.stack(own).sum(0), own[rank].to(device)
    pairs: list[tuple[Any, Any]] = []
    match name.removeprefix("hvd."):
        case "allreduce":
            pairs = [(hvd.allreduce(x), total / len(ranks)), (hvd.allreduce(x.half(), op=hvd.Sum), total.half())]
            handles = [hvd.allreduce_async_(y, op=op) for y, op in ((x.clone(), hvd.Min), (x.int(), hvd.Max))]
            pairs += [(hvd.synchronize(handles[1]), own[-1].int()), (hvd.synchronize(handles[0]), own[0])]
            pairs += list(zip(hvd.grouped_allreduce([x, x[0]], op=hvd.Sum), (total, total[0]), strict=True))
        case "allgather":
            pairs = [(hvd.allgather(x[: rank + 1]), torch.cat([y[: r + 1] for r, y in enumerate(own)]))]
        case "broadcast":
            pairs = [(hvd.broadcast(x, len(ranks) - 1), own[-1]), (hvd.broadcast_(x.clone(), 0), own[0])]
        case "alltoall":  # the first row to rank 0, the others to the last
            splits = torch.zeros(len(ranks), dtype=torch.int32)
            splits[0] += 1
            splits[-1] += 3
            theirs = [y[slice(0 if rank == 0 else 1, 1 if rank < ranks[-1] else 4)] for y in own]
            came, numbers = hvd.alltoall(x, splits)
            pairs = [(came, torch.cat(theirs)), (numbers.to(device), torch.tensor([len(y) for y in theirs]).int())]
        case "reducescatter":
            shares = total.tensor_split(len(ranks))
            pairs = [(hvd.reducescatter(x, op=hvd.Sum), shares[rank])]
        case "SyncBatchNorm":
            ours, usual = hvd.SyncBatchNorm(3).to(device), nn.BatchNorm1d(3)
            mine, every = x.clone().requires_grad_(), torch.cat(own).requires_grad_()
            found, expected = ours(mine), usual(every)
            found.pow(3).sum().backward()
            expected.pow(3).sum().backward()
            assert every.grad is not None
            here = slice(4 * rank, 4 * rank + 4)
            pairs = [(found.detach(), expected.detach()[here]), (mine.grad, every.grad[here])]
            pairs += [(ours.running_var, usual.running_var)]
        case "DistributedOptimizer":
            model, alone = net(device), net("cpu")
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), model.named_parameters(),
                compression=hvd.Compression.fp16,
            )  # fmt: skip
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            native = torch.optim.SGD(alone.parameters(), lr=RATE, momentum=0.9)
            for _ in range(STEPS):
                optimizer.zero_grad()
                native.zero_grad()
                model(batch(rank).to(device)).square().sum().backward()
                for r in ranks:
                    (alone(batch(r)).square().sum() / len(ranks)).backward()
                optimizer.step()
                native.step()
            pairs = list(zip(model.state_dict().values(), alone.state_dict().values(), strict=True))
        case _:
            raise AssertionError(f"{name} is not checked")
    wrong = [
        f"{found.cpu()} is not {expected}" for found, expected in pairs
        if found.device.type != torch.device(device).type or found.dtype != expected.dtype
        or not torch.allclose(found.cpu(), expected, rtol=1e-3, atol=1e-4)  # of halves
    ]  # fmt: skip
    return " ".join(" ".join(text for each in hvd.allgather_object(wrong) for text in each).split())


@cache
def reference(spec: str, ranks: int) -> dict[str, Tensor]:
    """What :func:`rank` should find: the gradients on the CPU, aggregated by the simulation."""
    models = [net("cpu") for _ in range(ranks)]
    at_first = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    simulation = hb.Simulation(spec, at_first, ranks)
    for _ in range(STEPS):
        each = []
        for number, model in enumerate(models):
            model.zero_grad()
            model(batch(number)).square().sum().backward()
            each.append({name: p.grad for name, p in model.named_parameters()})
        stepped = [
            {name: p.detach() - RATE * update[name] for name, p in model.named_parameters()}
            for model, update in zip(models, simulation.step(each), strict=True)
        ]
        for model, parameters in zip(models, simulation.after_step(stepped), strict=True):
            model.load_state_dict(parameters)
    return {name: p.detach() - at_first[name] for name, p in models[0].named_parameters()}


# ---------------------------------------------------------------------------------------- collectives


def collectives(device: str) -> Iterator[Finding]:
    """The communicators' own way through NCCL (Gloo without a GPU), which one GPU has for one rank only: every request
    of every type, small and large. Nobody else adds to it, so an answer is what was asked with."""
    library = "NCCL" if device == "cuda" else "Gloo"
    if device == "cuda" and not dist.is_nccl_available():
        yield Finding(f"torch, {library}, 1 rank", "all", "missing", "this torch is built without NCCL")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        comm = EvenAlone("cuda_check", store, 0, 1, timedelta(seconds=60), device == "cuda")
        yield from carried(f"torch, {library}, 1 rank", comm, device)
    part = f"horovod, {library}, 1 rank"
    if not importlib.util.find_spec("horovod"):
        yield Finding(part, "all", "missing", "horovod is not installed")
        return
    try:
        import horovod.torch

        from hvdbridge.backends.horovod.communicator import HorovodCommunicator
    except Exception as error:
        yield Finding(part, "all", "missing", f"{type(error).__name__}: {error}"[:150])
        return
    if device == "cuda" and not horovod.torch.nccl_built():
        yield Finding(part, "all", "missing", "built without NCCL; see hvdbridge install-horovod --with-nccl")
        return
    horovod.torch.init()
    world = HorovodCommunicator.world()
    world.alone = False
    yield from carried(part, world, device)
    horovod.torch.shutdown()


def carried(part: str, comm: Bridged, device: str) -> Iterator[Finding]:
    """What a communicator of one rank answers."""
    comm.piece = 1 << 20  # so that what is large travels in several
    for dtype in DTYPES:
        try:
            wrong = [
                request.signature()
                for numel in (1, 5, 3_000, 1_000_003)
                for request, expected in asked(torch.arange(numel).remainder(100).to(device, dtype))
                if not torch.equal(comm.execute(request), expected)
            ]
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        yield Finding(part, str(dtype), "WRONG" if wrong else "ok", ", ".join(wrong)[:150] or "as expected")
    comm.close()


def asked(x: Tensor) -> Iterator[tuple[Collective, Tensor]]:
    """Requests, and what one rank alone should get."""
    for op in OPS if x.dtype != torch.bool else ("min", "max"):
        yield AllReduce(x.clone(), op), x
        yield ReduceScatter(x[None].clone(), op), x
    yield AllGather(x), x[None]
    yield AllToAll(x[None].clone()), x[None]
    yield Broadcast(x.clone(), 0), x


# -------------------------------------------------------------------------------------------- kernels


def kernels(device: str) -> Iterator[Finding]:
    """Bytes read and written per second, and elements per second, relative to a copy; medians, in turn."""
    if device == "cuda":
        yield triton(torch.device(device, torch.cuda.current_device()))
    numel = ELEMENTS * (10 if device == "cuda" else 1)  # more than a GPU's cache holds
    x = torch.randn(numel, device=device)
    y, half = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    blocks = Blocks([Part(0, numel)], 1024, numel, device)
    layout = Layout({"w": (numel,)})
    plan = select.Plan.of(layout, {"w": numel // 100}, x.device)
    messages = _code_plan(Bucket(x, layout), 1024).everyone
    room = torch.empty(messages.nbytes(ScaledSign()), dtype=torch.uint8, device=device)
    bits, limit = x.view(torch.int32), torch.tensor([2.576], device=device).view(torch.int32)  # 1 % reach it
    found = torch.empty(numel // 50, dtype=torch.int32, device=device)
    kernel = on_cuda(x.device) if device == "cuda" else None

    def threshold() -> None:
        if kernel:
            kernel.reaching(bits, limit, found.fill_(-1))
        else:
            select.reaching(bits.numpy(), int(limit.item()), numel // 100)

    there = select.Plan.of(layout, {"w": numel // 100}, torch.device("cpu"))
    mine, theirs = (select.largest(*each)[0].sort().values.cpu() for each in ((x, plan), (x.cpu(), there)))
    verdict, told = ("ok", "the CPU's") if torch.equal(mine, theirs) else ("WRONG", "others than the CPU's")
    yield Finding("kernel", "top-k 1 %, which", verdict, told)
    # With neither a sample nor a kernel, magnitudes are written, and read once more at least
    of_top_k = 4.12 if kernel or device == "cpu" else 12.12
    matrix, q = x.view(1, -1, 2048), torch.randn(1, 4, 2048, device=device)

    def low_rank() -> None:
        project(aligned(project(q, matrix, ROWS)), matrix, COLS)

    if device == "cuda" and not kernel:
        yield Finding("kernel", "threshold, 1 % reach it", "slow", "no kernel here: torch.topk searches all")
    ways: dict[str, tuple[Callable[[], object], float]] = {  # and the bytes that must pass through memory
        "copy": (lambda: y.copy_(x), 8.0),
        "cast to bfloat16": (lambda: half.copy_(x), 6.0),
        "int8": (lambda: encode(Linear(127), x, blocks), 5.0),
        "1 bit": (lambda: messages.encode(ScaledSign(), x, 0, False, room), 4.13),
        **({"threshold, 1 % reach it": (threshold, 4.08)} if kernel or device == "cpu" else {}),
        "top-k 1 %": (lambda: select.largest(x, plan), of_top_k),
        "P and Q of rank 4": (low_rank, 8.0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(23):
        for name, (work, _) in ways.items():
            spent = timed(work, x.device)
            if turn >= 3:
                seconds[name].append(spent)
    rates = {name: ways[name][1] * numel / statistics.median(each) for name, each in seconds.items()}
    for name, rate in rates.items():
        share = rate / rates["copy"]
        elements = share * ways["copy"][1] / ways[name][1]
        told = f"{rate / 1e9:.1f} GB/s, {share:.2f} of the copy, and {elements:.2f} of its elements per second"
        slow = device == "cuda" and share < GOAL and name not in FREE
        told += " (no goal: more than one pass)" if name in FREE else ""
        yield Finding("kernel", name, "slow" if slow else "ok", told, share)


def triton(device: torch.device) -> Finding:
    """Whether Triton's kernels give the CPU's bits; where they do not, policies use torch's operations."""
    if not importlib.util.find_spec("triton"):
        return Finding("kernel", "Triton", "missing", "triton is not installed: what follows are torch's operations")
    try:
        from triton.runtime import driver

        driver.active.utils  # noqa: B018  # built by a C compiler when first asked for
    except Exception as error:
        return Finding("kernel", "Triton", "missing", f"{type(error).__name__}: {error}"[:150])
    from hvdbridge.kernels import cuda

    try:
        wrong = differences(cuda, device)
    except Exception as error:  # of any compiler
        wrong = f"{type(error).__name__}: {error}"
    return Finding("kernel", "Triton", "WRONG" if wrong else "ok", wrong[:150] or "the CPU's bits")


class EvenAlone(TorchCommunicator):
    even_alone = True


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds; on a GPU those of the GPU, which waits until all of it was handed over."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


# ---------------------------------------------------------------------------------------------- waits


def start_alone() -> None:
    """A job of one rank."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    hb.init(backend="torch")


def wide(layers: int) -> nn.Module:
    """On the GPU, of layers of 17 MB."""
    select.KERNEL = 1  # too small for kernels to search them, else; where topk is exact, torch.topk does
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).cuda()


def waits(device: str) -> Iterator[Finding]:
    """Host waits in a step where NCCL is the backend: the profiler's calls that block until the GPU is done. There
    should be none. One rank's collectives have nothing to do, so NCCL itself is not among what is seen."""
    if device != "cuda":
        yield Finding("waits", "all", "missing", "only a GPU has a queue that a host could wait for")
        return
    if not waited(lambda: torch.ones(1, device="cuda").item()):
        yield Finding("waits", "all", "WRONG", "the profiler does not show that item() waits, so it would show nothing")
        return
    start_alone()
    for spec in IN_STEPS:
        model = wide(3)
        sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=spec)
        x = torch.randn(16, WIDTH, device="cuda")

        def step(sync: Any = sync, x: Tensor = x) -> None:
            sync.optimizer.zero_grad()
            sync.model(x).square().sum().backward()
            sync.optimizer.step()

        for _ in range(12):  # in its first ten DDP waits for its own timers
            step()
        torch.cuda.synchronize()
        calls = waited(step)
        number = sum(calls.values())
        detail = ", ".join(f"{n} {key}" for key, n in calls.items()) or "none"
        yield Finding("waits", spec, "ok" if number == 0 else "WRONG", detail, number)
        sync.close()
    hb.shutdown()


def waited(work: Callable[[], object]) -> Counter[str]:
    """The calls of CUDA for which the host waits while ``work`` runs."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen, record_function(INTERVAL):
        work()
    return waits_in([
        (event.name(), event.start_ns(), event.duration_ns())
        for event in seen.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CPU  # type: ignore[attr-defined]
    ])  # fmt: skip


def waits_in(events: list[tuple[str, int, int]]) -> Counter[str]:
    """Of the host's events, as (name, start, nanoseconds), those of any thread that wait for a device, within
    :data:`INTERVAL`: before and after it the profiler waits itself."""
    begin, spent = next((start, spent) for name, start, spent in events if name == INTERVAL)
    return Counter(name for name, start, _ in events if WAITS.fullmatch(name) and begin <= start <= begin + spent)


# -------------------------------------------------------------------------------------------- overlap


def overlap(device: str) -> Iterator[Finding]:
    """How much of the policy's work on the GPU began before backward's last kernel had ended. All of what begins after
    it, a step waits for."""
    if device != "cuda":
        yield Finding("overlap", "all", "missing", "only a GPU has streams")
        return
    from torch.profiler import ProfilerActivity, profile

    start_alone()
    for spec in IN_STEPS:
        model = wide(12)
        sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=spec, bucket_mb=16)
        x = torch.randn(4096, WIDTH, device="cuda")
        for _ in range(12):
            loss = sync.model(x).square().mean()
            loss.backward()
        loss = sync.model(x).square().mean()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            loss.backward()
            torch.cuda.synchronize()
        yield overlapped(spec, [
            (event.device_resource_id(), event.name(), event.start_ns(), event.duration_ns())
            for event in seen.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        ])  # fmt: skip
        sync.close()
    hb.shutdown()


def overlapped(spec: str, kernels: list[tuple[int, str, int, int]]) -> Finding:
    """Of kernels as (stream, name, start, nanoseconds). The stream of backward is that of the matrix products that took
    longest: a policy's are thin."""
    products = [kernel for kernel in kernels if re.search("gemm|cutlass|nvjet", kernel[1].lower())]
    if not products:
        return Finding("overlap", spec, "WRONG", f"no matrix product among {len(kernels)} kernels")
    main = max(products, key=lambda kernel: kernel[3])[0]
    end = max(start + spent for stream, _, start, spent in products if stream == main)
    policy = [(start, spent) for stream, _, start, spent in kernels if stream != main]
    total = sum(spent for _, spent in policy)
    if not total:
        return Finding("overlap", spec, "ok", "the policy has no kernels with one rank")
    share = sum(spent for start, spent in policy if start < end) / total
    told = f"{share:.0%} of {total / 1e6:.2f} ms on other streams began before backward's last product ended"
    return Finding("overlap", spec, "ok" if share > 0 else "WRONG", told, share)


# ----------------------------------------------------------------------------------------------- main

PARTS: dict[str, Callable[[str], Iterator[Finding]]] = {
    "policies": policies, "collectives": collectives, "kernels": kernels, "waits": waits, "overlap": overlap,
    "jobs": jobs,  # which may take all that is left
}  # fmt: skip


def alone(part: str, device: str, seconds: float) -> list[Finding]:
    """Run one part in a process of its own, with so much time; what it had found by then stays."""
    line = [sys.executable, "-u", __file__, "--part", part, "--device", device, "--specs", *IN_JOBS]
    late = ""
    # Some images round float32 products; what the CPU finds is no reference for them
    env = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}
    with subprocess.Popen(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = f"no end after {seconds:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            out, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    found = [Finding(**json.loads(text)) for text in out.splitlines() if text.startswith("{")]
    if late or process.returncode:
        found.append(Finding(part, "the rest", "WRONG", late or " ".join(errors.split())[-150:]))
    return found


def environment(device: str) -> Iterator[Finding]:
    """What is here, and what is not."""
    yield Finding("environment", "torch", "ok", torch.__version__)
    for library in ("triton", "mpi4py", "horovod"):
        here = importlib.util.find_spec(library) is not None
        yield Finding("environment", library, "ok" if here else "missing", "")
    if device == "cuda":
        yield Finding("environment", "GPU", "ok", torch.cuda.get_device_name())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, default=Path("build/cuda_check.json"), metavar="FILE")
    parser.add_argument("--part", choices=[*PARTS, "rank"], help=argparse.SUPPRESS)
    parser.add_argument("--specs", nargs="*", default=IN_JOBS, help="the policies of real jobs (default: all)")
    arguments = parser.parse_args()
    IN_JOBS[:] = arguments.specs
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/cuda_check.py: torch sees no GPU here. --device cpu checks what needs none.", file=sys.stderr)
        return 2
    if arguments.part == "rank":
        rank(arguments.device, arguments.specs)
        return 0
    if arguments.part:
        for finding in PARTS[arguments.part](arguments.device):
            print(json.dumps(asdict(finding)), flush=True)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 130)
    ends = time.monotonic() + SECONDS
    findings = list(environment(arguments.device))
    for part in PARTS:
        console.print(f"{part} ...", style="dim")
        findings += alone(part, arguments.device, max(1.0, ends - time.monotonic()))
    table = Table("part", "what", "verdict", "detail")
    for one in findings:
        table.add_row(one.part, one.what, one.verdict, one.detail)
    console.print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps([asdict(one) for one in findings], indent=1) + "\n")
    wrong = [one for one in findings if one.verdict == "WRONG"]
    console.print(f"{len(findings)} findings, {len(wrong)} wrong; {arguments.json}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
