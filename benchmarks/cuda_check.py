"""Check every policy on one GPU against the CPU, the kernels' speed against a copy's, and that steps do not wait.

    python benchmarks/cuda_check.py [--json FILE]         # less than 4 minutes; with --quick, 90 seconds
    torchrun --nproc-per-node N benchmarks/cuda_check.py  # several GPUs: CUDA graphs alone, see cuda_graphs.py
    python benchmarks/cuda_check.py --device cpu          # all parts that need no GPU, to test this script

The script needs this repository and torch; it uses mpi4py and Horovod if they are installed. Rows with the verdict
"missing" or "slow" do not fail the check; a row with the verdict "WRONG" does (exit status 1).

Rules:

1. The CPU's simulation is the reference: it has the same gradients, the same seeds and the same flows.
2. Two devices add and multiply in different orders, and round a value between two codes to either code. So the script
   compares the relative error of the whole update, |cuda - cpu| / |cpu|. A float32 sum of few terms differs by about
   1e-7; rounding to another code changes few elements by one step of the code. A wrong kernel differs by about 1e-1.
3. Every part runs in its own process, so that a device in an error state ends that part only.
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
from hvdbridge.backends.torch.communicator import REDUCE_OPTIONS, TorchCommunicator
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
"""Policies whose results do not depend on the bucket layout of a job, which a simulation does not know."""
CALLS = ["hvd.allreduce", "hvd.allgather", "hvd.broadcast", "hvd.alltoall", "hvd.reducescatter", "hvd.SyncBatchNorm",
         "hvd.DistributedOptimizer"]  # fmt: skip
SHAPES = {"conv.weight": (32, 16, 3, 3), "fc.weight": (300, 200), "fc.bias": (200,), "scale": ()}
STEPS, LR = 2, 1e-3
"""Steps and learning rate of a job: some policies start, or communicate, only after the first step."""
GOAL = 0.7
"""Share of the copy's bytes per second that a single pass over a vector should reach on a GPU; less is "slow"."""
NO_GOAL = ("top-k 1 %", "P and Q of rank 4")
"""Kernels without that goal: top-k makes more than one pass, and arithmetic limits matrix products, too."""
MAX_ERROR = 1e-2
"""Relative error from which a result is wrong; see rule 2."""
SIGNS, FLIPS = ("sign:momentum=0.9", "efsign", "onebit"), 2
"""Policies that may change the sign of FLIPS elements of a job's update: each device computes its own gradients."""
WIDTH = 2048
"""Inputs and outputs of a layer of :func:`wide`."""
ELEMENTS = 26 * 2**20 // 4
"""float32 elements of a bucket of 26 MiB."""
INTERVAL = "cuda_check: what must not wait"
WAITS = re.compile(
    "cuda(Stream|Device|Event)Synchronize|cudaMemcpy|cu(Stream|Ctx|Event)Synchronize|cuMemcpy[DH]to[DH](_v2)?"
)
CYCLES = 4_000_000
"""GPU clock cycles, 2 to 4 ms: longer than the host needs to enqueue the operations of a kernel row."""
JOB_SECONDS = 90
"""Time limit of each backend's jobs, which run last."""
SECONDS = {"cuda": 240, "cpu": 460}
QUICK_SECONDS = 90
"""Time limits of all parts together, so that the script ends in time even if a part hangs."""
REGIMES = {"host-bound": ["--batch", "4", "--length", "512"], "GPU-bound": ["--batch", "16", "--length", "1024"]}
MOST_MS = {
    "mean": 0.3, "fp16": 1.5, "bf16": 1.5, "int8": 1.5, "onebit": 3.0, "topk": 3.0, "powersgd": 4.0,
}  # fmt: skip
"""Milliseconds that a step of cuda_step.py should at most take above plain DDP; more is "slow"."""


@dataclass(frozen=True)
class Finding:
    """One row of the report: ``verdict`` is ok, slow, WRONG or missing; ``detail`` explains the figure ``value``."""

    part: str
    what: str
    verdict: str
    detail: str
    value: float | None = None


# ------------------------------------------------------------------------------------------- policies


def policies(device: str) -> Iterator[Finding]:
    """Compare three steps of four simulated ranks on the device with those on the CPU."""
    for spec in SPECS:
        try:
            yield compared("policy", spec, run(spec, device), run(spec, "cpu"))
        except Exception as error:
            yield Finding("policy", spec, "WRONG", f"{type(error).__name__}: {error}"[:150])


def run(spec: str, device: str, ranks: int = 4, steps: int = 3) -> list[dict[str, Tensor]]:
    """Return rank 0's parameters, copied to the CPU, after each step of plain gradient descent from zeros."""
    history, zeros = [], {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    simulation = hb.Simulation(spec, zeros, ranks, 2)
    params = [zeros] * ranks
    for step in range(steps):
        updates = simulation.step([gradients(rank, step, device) for rank in range(ranks)])
        stepped = [{n: p - update[n] for n, p in old.items()} for old, update in zip(params, updates, strict=True)]
        params = simulation.after_step(stepped)
        if simulation.policy.replicas == "same":
            assert all(torch.equal(params[0][name], other[name]) for other in params for name in SHAPES), "ranks differ"
        history.append({name: p.cpu() for name, p in params[0].items()})
    return history


def gradients(rank: int, step: int, device: str) -> dict[str, Tensor]:
    """Return normal gradients, drawn on the CPU so that all devices get the same numbers."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=rng).to(device) for name, shape in SHAPES.items()}


def compared(
    part: str, what: str, results: list[dict[str, Tensor]], reference: list[dict[str, Tensor]], flips: int = 0
) -> Finding:
    """Compare two lists of updates by rule 2; the worst step decides. Other signs of ``flips`` elements, all of equal
    magnitude, change an update of n elements by ``2 sqrt(flips / n)``."""
    errors, limit = [], MAX_ERROR
    for result, expected in zip(results, reference, strict=True):
        a, b = (torch.cat([t.double().reshape(-1) for t in tensors.values()]) for tensors in (result, expected))
        errors.append(float((a - b).norm() / b.norm().clamp(min=1e-30)))
        limit = max(MAX_ERROR, 2.01 * math.sqrt(flips / b.numel()))
    correct = all(error < limit for error in errors)  # False for NaN
    return Finding(part, what, "ok" if correct else "WRONG", f"relative error {max(errors):.1e}", max(errors))


# ----------------------------------------------------------------------------------------------- jobs


def jobs(device: str) -> Iterator[Finding]:
    """Run real jobs: torch with one rank, then torch (Gloo), MPI and Horovod with two ranks on the one GPU."""
    available = {"torch": True, "mpi": bool(importlib.util.find_spec("mpi4py")),
                 "horovod": bool(importlib.util.find_spec("horovod"))}  # fmt: skip
    for backend, ranks in (("torch", 1), ("torch", 2), ("mpi", 2), ("horovod", 2)):
        part = f"{backend}, {ranks} rank{'s' * (ranks > 1)}"
        if not available[backend]:
            yield Finding(part, "all", "missing", f"{backend} is not installed")
            continue
        remaining, deadline = [*CALLS, *IN_JOBS], time.monotonic() + JOB_SECONDS
        while remaining:
            results, failure = job(backend, ranks, device, remaining, deadline)
            for spec, result in results.items():
                if spec in CALLS:
                    yield Finding(part, spec, "WRONG" if result else "ok", result[:150] or "as expected")
                elif isinstance(result, str):
                    yield Finding(part, spec, "missing", result[:150])
                else:
                    change = {name: torch.tensor(value) for name, value in result.items()}
                    yield compared(part, spec, [change], [reference(spec, ranks)], FLIPS * (spec in SIGNS))
            remaining = [spec for spec in remaining if spec not in results]
            if not failure:
                break
            if "BackendUnavailable" in failure:
                yield Finding(part, "all", "missing", failure[-150:])
                break
            yield Finding(part, remaining.pop(0) if remaining else "the end", "WRONG", failure[-150:])
            if remaining and time.monotonic() > deadline:
                yield Finding(part, "the rest", "WRONG", f"no time is left of {JOB_SECONDS} s")
                break
            # The next job runs the policies after the one that failed.


def job(backend: str, ranks: int, device: str, specs: Sequence[str], deadline: float) -> tuple[dict[str, Any], str]:
    """Run ranks without a launcher; return rank 0's results by policy, and why some are missing ("" if none is)."""
    env = os.environ | {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "HVDBRIDGE_BACKEND": backend,
    }  # fmt: skip
    argv = [sys.executable, __file__, "--part", "rank", "--device", device, "--specs", *specs]
    processes = [
        subprocess.Popen(
            argv, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    timeout = ""
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            timeout = f"no end after {JOB_SECONDS} s"
            process.kill()
            outputs.append(process.communicate()[0])
    lines = outputs[0].splitlines()
    results: dict[str, Any] = {}
    for line in lines:  # other lines are warnings of libraries
        if line.startswith("{"):
            results |= json.loads(line)
    failed = timeout or any(process.returncode for process in processes)
    log = " ".join(line for line in lines if not line.startswith("{"))
    return results, (timeout or log or "it ended without a word") if failed or not results else ""


def net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50)).to(device)


def batch(rank: int) -> Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(rank))


def rank(device: str, specs: Sequence[str]) -> None:
    """Print, on rank 0, the errors of each call, and the changes of parameters by STEPS steps of each policy."""
    hvd.init()
    for spec in specs:
        if spec in CALLS:
            errors = check_call(spec, str(hb.device()) if device == "cuda" else "cpu")
            if hb.rank() == 0:
                print(json.dumps({spec: errors}), flush=True)
            continue
        model = net(str(hb.device()) if device == "cuda" else "cpu")
        initial = [p.detach().clone() for p in model.parameters()]
        try:
            with initial[0].device:
                sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=LR), policy=spec)
        except ConfigurationError as error:  # all ranks raise it, for a policy that needs more ranks
            result: Any = str(error)
        else:
            x = batch(hb.rank()).to(initial[0].device)
            with initial[0].device:  # as scripts with torch.set_default_device do
                for _ in range(STEPS):
                    sync.optimizer.zero_grad()
                    sync.model(x).square().sum().backward()
                    sync.optimizer.step()
            pairs = zip(model.named_parameters(), initial, strict=True)
            result = {name: (p.detach() - start).cpu().tolist() for (name, p), start in pairs}
            sync.close()
        if hb.rank() == 0:
            print(json.dumps({spec: result}), flush=True)
    hb.barrier()
    hvd.shutdown()


def check_call(name: str, device: str) -> str:
    """Return the differences of a call's results from those of the CPU, on all ranks; "" if there are none."""
    rank, ranks = hb.rank(), range(hb.size())
    inputs = [torch.arange(12.0).view(4, 3) * (r + 1) for r in ranks]
    total, x = torch.stack(inputs).sum(0), inputs[rank].to(device)
    pairs: list[tuple[Any, Any]] = []
    match name.removeprefix("hvd."):
        case "allreduce":
            pairs = [(hvd.allreduce(x), total / len(ranks)), (hvd.allreduce(x.half(), op=hvd.Sum), total.half())]
            handles = [hvd.allreduce_async_(y, op=op) for y, op in ((x.clone(), hvd.Min), (x.int(), hvd.Max))]
            pairs += [(hvd.synchronize(handles[1]), inputs[-1].int()), (hvd.synchronize(handles[0]), inputs[0])]
            pairs += list(zip(hvd.grouped_allreduce([x, x[0]], op=hvd.Sum), (total, total[0]), strict=True))
        case "allgather":
            pairs = [(hvd.allgather(x[: rank + 1]), torch.cat([y[: r + 1] for r, y in enumerate(inputs)]))]
        case "broadcast":
            pairs = [(hvd.broadcast(x, len(ranks) - 1), inputs[-1]), (hvd.broadcast_(x.clone(), 0), inputs[0])]
        case "alltoall":  # the first row to rank 0, the others to the last
            splits = torch.zeros(len(ranks), dtype=torch.int32)
            splits[0] += 1
            splits[-1] += 3
            received = [y[slice(0 if rank == 0 else 1, 1 if rank < ranks[-1] else 4)] for y in inputs]
            output, sizes = hvd.alltoall(x, splits)
            pairs = [(output, torch.cat(received)), (sizes.to(device), torch.tensor([len(y) for y in received]).int())]
        case "reducescatter":
            shares = total.tensor_split(len(ranks))
            pairs = [(hvd.reducescatter(x, op=hvd.Sum), shares[rank])]
        case "SyncBatchNorm":
            synced, plain = hvd.SyncBatchNorm(3).to(device), nn.BatchNorm1d(3)
            local, all_rows = x.clone().requires_grad_(), torch.cat(inputs).requires_grad_()
            result, expected = synced(local), plain(all_rows)
            result.pow(3).sum().backward()
            expected.pow(3).sum().backward()
            assert all_rows.grad is not None
            own_rows = slice(4 * rank, 4 * rank + 4)
            pairs = [(result.detach(), expected.detach()[own_rows]), (local.grad, all_rows.grad[own_rows])]
            pairs += [(synced.running_var, plain.running_var)]
        case "DistributedOptimizer":
            model, reference_model = net(device), net("cpu")
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), model.named_parameters(),
                compression=hvd.Compression.fp16,
            )  # fmt: skip
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            native = torch.optim.SGD(reference_model.parameters(), lr=LR, momentum=0.9)
            for _ in range(STEPS):
                optimizer.zero_grad()
                native.zero_grad()
                model(batch(rank).to(device)).square().sum().backward()
                for r in ranks:
                    (reference_model(batch(r)).square().sum() / len(ranks)).backward()
                optimizer.step()
                native.step()
            pairs = list(zip(model.state_dict().values(), reference_model.state_dict().values(), strict=True))
        case _:
            raise AssertionError(f"{name} is not checked")
    errors = [
        f"{result.cpu()} is not {expected}" for result, expected in pairs
        if result.device.type != torch.device(device).type or result.dtype != expected.dtype
        or not torch.allclose(result.cpu(), expected, rtol=1e-3, atol=1e-4)  # tolerances of float16
    ]  # fmt: skip
    return " ".join(" ".join(text for messages in hvd.allgather_object(errors) for text in messages).split())


@cache
def reference(spec: str, ranks: int) -> dict[str, Tensor]:
    """Return the changes of parameters that :func:`rank` should print, from the CPU's gradients and the simulation."""
    models = [net("cpu") for _ in range(ranks)]
    initial = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    simulation = hb.Simulation(spec, initial, ranks)
    for _ in range(STEPS):
        grads = []
        for number, model in enumerate(models):
            model.zero_grad()
            model(batch(number)).square().sum().backward()
            grads.append({name: p.grad for name, p in model.named_parameters()})
        stepped = [
            {name: p.detach() - LR * update[name] for name, p in model.named_parameters()}
            for model, update in zip(models, simulation.step(grads), strict=True)
        ]
        for model, parameters in zip(models, simulation.after_step(stepped), strict=True):
            model.load_state_dict(parameters)
    return {name: p.detach() - initial[name] for name, p in models[0].named_parameters()}


# ---------------------------------------------------------------------------------------- collectives


def collectives(device: str) -> Iterator[Finding]:
    """Check all requests of all dtypes and of several sizes through NCCL (Gloo without a GPU), by torch and Horovod.

    One GPU allows NCCL one rank only. The answer of a single rank must equal its input."""
    library = "NCCL" if device == "cuda" else "Gloo"
    if device == "cuda" and not dist.is_nccl_available():
        yield Finding(f"torch, {library}, 1 rank", "all", "missing", "this torch is built without NCCL")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        comm = AlwaysCommunicates("cuda_check", store, 0, 1, timedelta(seconds=60), device == "cuda")
        yield from check_communicator(f"torch, {library}, 1 rank", comm, device)
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
    world.local_only = False
    yield from check_communicator(part, world, device)
    horovod.torch.shutdown()


def check_communicator(part: str, comm: Bridged, device: str) -> Iterator[Finding]:
    """Check the answers of a communicator of one rank."""
    comm.max_operation_bytes = 1 << 20  # so that large tensors are sent in several chunks
    for dtype in DTYPES:
        try:
            errors = [
                request.signature()
                for numel in (1, 5, 3_000, 1_000_003)
                for request, expected in requests(torch.arange(numel).remainder(100).to(device, dtype))
                if not torch.equal(comm.execute(request), expected)
            ]
        except Exception as error:
            errors = [f"{type(error).__name__}: {error}"]
        yield Finding(part, str(dtype), "WRONG" if errors else "ok", ", ".join(errors)[:150] or "as expected")
    comm.close()


def requests(x: Tensor) -> Iterator[tuple[Collective, Tensor]]:
    """Yield requests and the answers that a single rank should get."""
    for op in REDUCE_OPTIONS if x.dtype != torch.bool else ("min", "max"):
        yield AllReduce(x.clone(), op), x
        yield ReduceScatter(x[None].clone(), op), x
    yield AllGather(x), x[None]
    yield AllToAll(x[None].clone()), x[None]
    yield Broadcast(x.clone(), 0), x


# -------------------------------------------------------------------------------------------- kernels


def kernels(device: str) -> Iterator[Finding]:
    """Measure bytes read and written per second relative to a copy: medians of alternating runs."""
    if device == "cuda":
        yield check_triton(torch.device(device, torch.cuda.current_device()))
    numel = ELEMENTS * (10 if device == "cuda" else 1)  # more than a GPU's cache can hold
    x = torch.randn(numel, device=device)
    y, bfloat16 = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    blocks = Blocks([Part(0, numel)], 1024, numel, device)
    layout = Layout({"w": (numel,)})
    plan = select.Plan.of(layout, {"w": numel // 100}, x.device)
    messages = _code_plan(Bucket(x, layout), 1024).all_shards
    message_buffer = torch.empty(messages.nbytes(ScaledSign()), dtype=torch.uint8, device=device)
    bits, limit = x.view(torch.int32), torch.tensor([2.576], device=device).view(torch.int32)  # 1 % reach it
    kernel = on_cuda(x.device) if device == "cuda" else None
    if kernel:
        from hvdbridge.kernels import candidates, cuda_select

        searched = candidates.Blocks([0], [numel], [numel // 50], x.device)

    def threshold() -> None:
        if kernel:
            searched.positions(cuda_select, bits, limit)
        else:
            select.threshold_positions(bits.numpy(), int(limit.item()), numel // 100)

    cpu_plan = select.Plan.of(layout, {"w": numel // 100}, torch.device("cpu"))
    values, expected = (select.largest(*args)[0].sort().values.cpu() for args in ((x, plan), (x.cpu(), cpu_plan)))
    verdict, detail = ("ok", "the CPU's") if torch.equal(values, expected) else ("WRONG", "others than the CPU's")
    yield Finding("kernel", "top-k 1 %, which", verdict, detail)
    # Without a kernel on CUDA, magnitudes are written, and read at least once more.
    of_top_k = 4.12 if kernel or device == "cpu" else 12.12
    matrix, q = x.view(1, -1, 2048), torch.randn(1, 4, 2048, device=device)

    def low_rank() -> None:
        project(aligned(project(q, matrix, ROWS)), matrix, COLS)

    if device == "cuda" and not kernel:
        yield Finding("kernel", "threshold, 1 % reach it", "slow", "no kernel here: torch.topk searches all")
    operations: dict[str, tuple[Callable[[], object], float]] = {  # with bytes per element through memory
        "copy": (lambda: y.copy_(x), 8.0),
        "cast to bfloat16": (lambda: bfloat16.copy_(x), 6.0),
        "int8": (lambda: encode(Linear(127), x, blocks), 5.0),
        "1 bit": (lambda: messages.encode(ScaledSign(), x, 0, False, message_buffer), 4.13),
        **({"threshold, 1 % reach it": (threshold, 4.08)} if kernel or device == "cpu" else {}),
        "top-k 1 %": (lambda: select.largest(x, plan), of_top_k),
        "P and Q of rank 4": (low_rank, 8.0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for repeat in range(23):
        for name, (work, _) in operations.items():
            elapsed = timed(work, x.device)
            if repeat >= 3:
                seconds[name].append(elapsed)
    rates = {name: operations[name][1] * numel / statistics.median(samples) for name, samples in seconds.items()}
    for name, rate in rates.items():
        share = rate / rates["copy"]
        elements = share * operations["copy"][1] / operations[name][1]
        detail = f"{rate / 1e9:.1f} GB/s, {share:.2f} of the copy, and {elements:.2f} of its elements per second"
        slow = device == "cuda" and share < GOAL and name not in NO_GOAL
        detail += " (no goal: more than one pass)" if name in NO_GOAL else ""
        yield Finding("kernel", name, "slow" if slow else "ok", detail, share)


def check_triton(device: torch.device) -> Finding:
    """Check that Triton's kernels give the CPU's bits."""
    if not importlib.util.find_spec("triton"):
        return Finding("kernel", "Triton", "missing", "triton is not installed: what follows are torch's operations")
    try:
        from triton.runtime import driver

        driver.active.utils  # noqa: B018  # the first access builds it with a C compiler
    except Exception as error:
        return Finding("kernel", "Triton", "missing", f"{type(error).__name__}: {error}"[:150])
    try:
        difference = differences(device)
    except Exception as error:  # Triton and its compilers raise many types
        difference = f"{type(error).__name__}: {error}"
    return Finding("kernel", "Triton", "WRONG" if difference else "ok", difference[:150] or "the CPU's bits")


class AlwaysCommunicates(TorchCommunicator):
    """A communicator whose library also runs for a single rank."""

    always_communicate = True


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``work``; on a GPU those of the GPU, which starts once all operations are enqueued."""
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
    """Start a session of one rank."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    hb.init(backend="torch")


def wide(layers: int) -> nn.Module:
    """Return a model on the GPU with layers of 17 MB."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).cuda()


def waits(device: str) -> Iterator[Finding]:
    """Count the host waits of a step with NCCL: calls in the profile that block until the GPU is done. None may occur.

    With one rank the collectives do nothing, so NCCL's own calls are not checked."""
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

        for _ in range(12):  # in its first ten steps DDP waits for its own timers
            step()
        torch.cuda.synchronize()
        calls = waited(step)
        number = sum(calls.values())
        detail = ", ".join(f"{n} {key}" for key, n in calls.items()) or "none"
        yield Finding("waits", spec, "ok" if number == 0 else "WRONG", detail, number)
        sync.close()
    hb.shutdown()


def waited(work: Callable[[], object]) -> Counter[str]:
    """Count the CUDA calls in which the host waits while ``work`` runs."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled, record_function(INTERVAL):
        work()
    return waits_in([
        (event.name(), event.start_ns(), event.duration_ns())
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CPU  # type: ignore[attr-defined]
    ])  # fmt: skip


def waits_in(events: list[tuple[str, int, int]]) -> Counter[str]:
    """Count the waits for a device, by name, among host events of all threads, given as (name, start ns, duration ns).

    Only events within :data:`INTERVAL` count, because the profiler itself waits before and after it."""
    begin, duration = next((start, duration) for name, start, duration in events if name == INTERVAL)
    return Counter(name for name, start, _ in events if WAITS.fullmatch(name) and begin <= start <= begin + duration)


# -------------------------------------------------------------------------------------------- overlap


def overlap(device: str) -> Iterator[Finding]:
    """Measure the share of a policy's GPU work that starts before backward's last kernel ends. A step waits for the
    rest."""
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
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            loss.backward()
            torch.cuda.synchronize()
        yield overlapped(spec, [
            (event.device_resource_id(), event.name(), event.start_ns(), event.duration_ns())
            for event in profiled.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        ])  # fmt: skip
        sync.close()
    hb.shutdown()


def overlapped(spec: str, kernels: list[tuple[int, str, int, int]]) -> Finding:
    """Compute that share from kernels, given as (stream, name, start ns, duration ns). Backward's stream is that of the
    longest matrix product, because those of a policy are thin."""
    products = [kernel for kernel in kernels if re.search("gemm|cutlass|nvjet", kernel[1].lower())]
    if not products:
        return Finding("overlap", spec, "WRONG", f"no matrix product among {len(kernels)} kernels")
    main = max(products, key=lambda kernel: kernel[3])[0]
    end = max(start + duration for stream, _, start, duration in products if stream == main)
    policy = [(start, duration) for stream, _, start, duration in kernels if stream != main]
    total = sum(duration for _, duration in policy)
    if not total:
        return Finding("overlap", spec, "ok", "the policy has no kernels with one rank")
    share = sum(duration for start, duration in policy if start < end) / total
    detail = f"{share:.0%} of {total / 1e6:.2f} ms on other streams began before backward's last product ended"
    return Finding("overlap", spec, "ok" if share > 0 else "WRONG", detail, share)


# --------------------------------------------------------------------------------------------- graphs


def graphs(device: str) -> Iterator[Finding]:
    """Compare training with CUDA graphs and without, for each policy."""
    if device != "cuda":
        yield Finding("graphs", "all", "missing", "only a GPU has them; cuda_graphs.py --tape has a stand-in")
        return
    import cuda_graphs

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    for row in cuda_graphs.rows(cuda_graphs.SPECS, cuda_graphs.STEPS, device):
        detail = f"{row['graphs']} graphs, relative error {row['error']:.1e}. {row['off'] or ''}"
        verdict = "slow" if row["verdict"] == "no graphs" else row["verdict"]
        yield Finding("graphs", row["policy"], verdict, detail[:150], row["error"])


def steps(device: str) -> Iterator[Finding]:
    """Measure what policies add to a step of GPT-2's shape, with CUDA graphs, in two regimes."""
    if device != "cuda":
        yield Finding("steps", "all", "missing", "only a GPU runs them in time")
        return
    for regime, options in REGIMES.items():
        argv = [sys.executable, str(Path(__file__).with_name("cuda_step.py")), *options]
        environ = os.environ | {"HVDBRIDGE_GRAPHS": "auto", "MASTER_PORT": str(free_port())}
        with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                slow = row["difference_ms"] > MOST_MS.get(row["way"], math.inf)
                detail = f"{row['difference_ms']} ms above DDP's {row['ddp_ms']}; {row['launches']} launches and "
                detail += f"{row['graph_launches']} of graphs, {row['peak_mb']} MB"
                yield Finding(f"steps, {regime}", row["way"], "slow" if slow else "ok", detail, row["difference_ms"])
        if process.returncode:
            yield Finding(f"steps, {regime}", "the rest", "WRONG", f"cuda_step.py: exit status {process.returncode}")


# ----------------------------------------------------------------------------------------------- main

PARTS: dict[str, Callable[[str], Iterator[Finding]]] = {
    "policies": policies, "graphs": graphs, "collectives": collectives, "kernels": kernels, "waits": waits,
    "steps": steps, "overlap": overlap, "jobs": jobs,  # last, because it may take all remaining time
}  # fmt: skip
QUICK = ("policies", "graphs", "kernels")


def run_part(part: str, device: str, seconds: float) -> list[Finding]:
    """Run one part in its own process for at most ``seconds``; return its findings up to its end or failure."""
    argv = [sys.executable, "-u", __file__, "--part", part, "--device", device, "--specs", *IN_JOBS]
    timeout = ""
    # Some container images enable TF32, whose products differ too much from the CPU's.
    env = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            timeout = f"no end after {seconds:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
            out, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    findings = [Finding(**json.loads(line)) for line in out.splitlines() if line.startswith("{")]
    if timeout or process.returncode:
        findings.append(Finding(part, "the rest", "WRONG", timeout or " ".join(errors.split())[-150:]))
    return findings


def environment(device: str) -> Iterator[Finding]:
    """Report which libraries are installed, and the GPU."""
    yield Finding("environment", "torch", "ok", torch.__version__)
    for library in ("triton", "mpi4py", "horovod"):
        installed = importlib.util.find_spec(library) is not None
        yield Finding("environment", library, "ok" if installed else "missing", "")
    if device == "cuda":
        yield Finding("environment", "GPU", "ok", torch.cuda.get_device_name())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--json", type=Path, default=Path("build/cuda_check.json"), metavar="FILE")
    parser.add_argument("--part", choices=[*PARTS, "rank"], help=argparse.SUPPRESS)
    parser.add_argument("--specs", nargs="*", default=IN_JOBS, help="the policies of real jobs (default: all)")
    arguments = parser.parse_args()
    IN_JOBS[:] = arguments.specs
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/cuda_check.py: torch sees no GPU here. --device cpu checks what needs none.", file=sys.stderr)
        return 2
    if not arguments.part and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import cuda_graphs

        return cuda_graphs.main([])
    if arguments.part == "rank":
        rank(arguments.device, arguments.specs)
        return 0
    if arguments.part:
        for finding in PARTS[arguments.part](arguments.device):
            print(json.dumps(asdict(finding)), flush=True)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 130)
    deadline = time.monotonic() + (QUICK_SECONDS if arguments.quick else SECONDS[arguments.device])
    findings = list(environment(arguments.device))
    for part in QUICK if arguments.quick else PARTS:
        console.print(f"{part} ...", style="dim")
        findings += run_part(part, arguments.device, max(1.0, deadline - time.monotonic()))
    table = Table("part", "what", "verdict", "detail")
    for finding in findings:
        table.add_row(finding.part, finding.what, finding.verdict, finding.detail)
    console.print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    wrong = [finding for finding in findings if finding.verdict == "WRONG"]
    console.print(f"{len(findings)} findings, {len(wrong)} wrong; {arguments.json}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
