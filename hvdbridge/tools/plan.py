"""``hvdbridge plan``: which policy to take, and what a step will take with up to 100,000 ranks.

::

    hvdbridge plan --model bert-base --gbits 10 --latency-us 30
    hvdbridge plan --model gpt2 --from bench.json     # network, computation, compression as `bench --json` found

With --from, what was predicted is printed beside what was measured, for a computation as long as it was beside that
policy; elsewhere all policies have the median. A policy that FILE does not have is timed on this machine alone. One of
your own is what the module of --model registers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.startup.world import usable_cores

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hvdbridge.policy.base import Policy
    from hvdbridge.tools.bench.cost import Planner, Prediction
    from hvdbridge.tools.bench.transport import Network

RANKS = (2, 4, 8, 16, 64, 256, 1024, 4096, 16384, 100_000)
# From the simplest to those that ask most of a training's recipe: docs/policies.md
POLICIES = [
    "mean", "bf16", "int8", "int4", "topk:ratio=0.01", "onebit", "powersgd:rank=4", "local_sgd:every=8",
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("--model", help="as in hvdbridge bench (default: FILE's, if it has one, else bert-base)")
    parser.add_argument("--policies", nargs="+", metavar="SPEC", help=f"default: {' '.join(POLICIES)}")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), metavar="N")
    parser.add_argument("--local-size", type=int, help="ranks per node (default: 1, or as in FILE)")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="what hvdbridge bench --json wrote")
    parser.add_argument("--gbits", type=float, help="the network's rate between nodes, Gbit/s")
    parser.add_argument("--latency-us", type=float, help="of one message (default: 25)")
    parser.add_argument("--local-gbits", type=float, help="inside a node (default: as in FILE, or as between them)")
    parser.add_argument("--local-latency-us", type=float, help="(default: 5)")
    parser.add_argument(
        "--compute-ms",
        type=float,
        help="a step without synchronization, on the machines planned for; policies are scaled by it "
        "(default: measured)",
    )
    parser.add_argument("--samples", type=int, help="images or tokens per step and rank")
    parser.add_argument("--bucket-mb", type=float, help="(default: as FILE's was said, or the usual one)")
    parser.add_argument(
        "--cores",
        type=float,
        help="cores per rank (default: as --from says, else those of this machine for each of its ranks; with "
        "--compute-ms at least as many as computing keeps busy)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")


@dataclass(frozen=True)
class Measured:
    """What is taken from a row of ``hvdbridge bench``: :class:`.measure.Row` says what it means."""

    ranks: int
    step: float
    compute: float
    compression: float
    cpu: float
    compute_cpu: float
    bucket_mb: float
    samples: int | None
    enqueued: bool

    @classmethod
    def of(cls, row: dict[str, Any], where: str) -> Measured:
        """From a file; raises ConfigurationError: a figure is missing, or cannot be."""
        from hvdbridge.tools.bench.checks import MOST_RANKS, number

        for name, kind in {"backend": str, "model": str, "policy": str, "enqueued": bool}.items():
            if not isinstance(row.get(name), kind):
                raise ConfigurationError(f"{where}.{name} {row.get(name)!r} must be {kind.__name__}")
        ranks = number(row, where, "ranks", most=MOST_RANKS)
        positive = {name: number(row, where, name) for name in ("step", "compute", "bucket_mb")}
        others = {name: number(row, where, name, 0) for name in ("compression", "cpu", "compute_cpu")}
        samples = None if row.get("samples") is None else number(row, where, "samples", most=MOST_RANKS)
        return cls(ranks=ranks, **positive, **others, samples=samples, enqueued=row["enqueued"])


@dataclass(frozen=True)
class Job:
    """What is known of the job: from the command line, or from what ``hvdbridge bench`` wrote.

    Attributes:
        nccl: it was the backend's library; None: no job is known, so it is if this machine has CUDA.
    """

    network: Network
    model: str
    samples: int | None
    compute: float | None = None
    rows: Mapping[str, Measured] = field(default_factory=dict)
    nccl: bool | None = None


def run(arguments: argparse.Namespace) -> int:
    import torch
    from torch.optim import SGD

    from hvdbridge.policies import from_spec
    from hvdbridge.reduction.parameters import trainable
    from hvdbridge.reduction.source import views_pay
    from hvdbridge.tools.bench import report
    from hvdbridge.tools.bench.checks import check_file, check_policies
    from hvdbridge.tools.bench.cost import Planner, measure_copy
    from hvdbridge.tools.bench.models import check_name, model

    _check_numbers(arguments)
    report.check_plot(arguments.plot)
    errors, console = Console(stderr=True), Console(soft_wrap=True)
    job = _job(arguments, errors)
    check_name(job.model, job.samples)
    check_policies(arguments.policies or [], [job.model])
    check_file("--json", arguments.json)
    check_file("--plot", arguments.plot)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    local_size = arguments.local_size or job.network.local_size
    machine = len(usable_cores()) if job.network.cores is None else job.network.cores * job.network.local_size
    with _threads(arguments.cores or machine / min(local_size, max(arguments.ranks))):
        module, loss = model(job.model, job.samples)
        module.to(device)
        params = {name: p.detach() for name, p in trainable(module).items()}
        products, optimizer, busy = _compute(lambda: loss(module).backward(), SGD(module.parameters(), lr=1e-6))
        compute = products + optimizer if job.compute is None else job.compute
        here = compute / (products + optimizer)  # another machine, or other ranks beside: all it computes scales alike
        shares = [row.compute_cpu / row.compute for row in job.rows.values()]
        busy = compute * statistics.median(shares) if shares else here * busy
        # With --compute-ms that is how long it takes there, so there are the cores for it
        least_cores = 0.0 if arguments.compute_ms is None else busy / compute
        copies = measure_copy(device) * sum(p.numel() for p in params.values())
        copies *= 1 if views_pay(module.parameters()) else 2
        planner = Planner(  # one product in forward, two in backward
            params, here * products / 3, here * products * 2 / 3, job.network, local_size=local_size,
            optimizer=here * optimizer, copies=here * copies, compute_cpu=busy, one_device=device == "cuda",
        )  # fmt: skip

        def cores(ranks: int) -> float:
            """For each of so many: no more of them share a machine than there are."""
            return arguments.cores or max(least_cores, machine / min(local_size, ranks))

        plan = _Plan(arguments, job, planner, cores, here, device, console)
        specs = arguments.policies or list(dict.fromkeys([*POLICIES, *job.rows]))
        first = sorted(specs, key=lambda spec: spec not in job.rows)  # what was measured says what others take beside
        for spec in track(first, "arithmetic", console=errors, transient=True, disable=not errors.is_terminal):
            if not errors.is_terminal:
                errors.print(f"arithmetic of {spec}", highlight=False, markup=False)
            try:
                plan.add(spec, from_spec(spec))
            except (ConfigurationError, Unsupported) as error:  # FILE's may be of another model's module
                console.print(f"{spec}: left out: {error}", markup=False)
    if not plan.found:
        return 2
    plan.found.sort(key=lambda one: specs.index(one.policy))
    report.show(report.predicted(plan.found))
    if plan.beside:
        report.show(report.compared(plan.beside))
    planned = sorted({one.ranks for one in plan.found})
    for ranks in planned:
        console.print(report.recommend(plan.found, ranks), highlight=False, markup=False)
    said = " as said" if arguments.compute_ms is not None else ""
    per_rank = " to ".join(f"{n:.3g}" for n in sorted({cores(planned[0]), cores(planned[-1])}))
    console.print(
        "Step times say nothing of what a policy does to the loss: docs/policies.md has that. "
        f"Computation {1e3 * compute:.1f} ms a step{said}, {per_rank} cores per rank.", highlight=False,
    )  # fmt: skip
    if arguments.json is not None:
        report.save(arguments.json, job.network, plan.found, model=job.model)
    if arguments.plot is not None:
        report.plot_predicted(arguments.plot, plan.found)
    return 0


@dataclass
class _Plan:
    """Predictions, policy by policy.

    Attributes:
        found: of each policy at each number of ranks.
        beside: those of the file's rows, with the seconds that were measured.
        overheads: those of the file's rows; a policy without a row has the least.
    """

    arguments: argparse.Namespace
    job: Job
    planner: Planner
    cores: Callable[[int], float]
    here: float
    device: str
    console: Console
    found: list[Prediction] = field(default_factory=list)
    beside: list[tuple[Prediction, float]] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)

    def add(self, spec: str, policy: Policy) -> None:
        """Raises ConfigurationError, Unsupported: the policy is not defined, or cannot be timed."""
        from hvdbridge.tools.bench.cost import kinds, measure_computation

        row = self.job.rows.get(spec)
        own, sizes = self._bucket_sizes(policy, row)
        computation = measure_computation(policy, self.planner.params, own, self.device, self.planner.local_size)
        factor, overhead = self.here, min(self.overheads, default=0.0)
        if row and not row.enqueued and kinds(policy)[1] in (0, 1):  # it says what the policy computes in every step
            there = self._as_measured(row, own)
            known = there.predict(spec, policy, row.ranks, computation)
            factor = row.compression / known.compression if known.compression else self.here
            overhead = row.cpu - there.predict(spec, policy, row.ranks, computation, factor).cpu
            self.overheads.append(overhead)
        for ranks in self.arguments.ranks:
            try:
                planner = replace(
                    self.planner, bucket_mb=sizes[ranks], cores=self.cores(ranks), overhead=overhead
                )
                self.found.append(planner.predict(spec, policy, ranks, computation, factor))
            except (ConfigurationError, Unsupported) as error:
                self.console.print(f"{spec}, {ranks} ranks: left out: {error}", markup=False)
        if row:
            there = replace(self._as_measured(row, own), overhead=overhead)
            self.beside.append((there.predict(spec, policy, row.ranks, computation, factor), row.step))

    def _as_measured(self, row: Measured, bucket_mb: float) -> Planner:
        """For the machine, and the computation, of a row."""
        planner, network = self.planner, self.planner.network
        own = planner.scaled(row.compute / (planner.forward + planner.backward + planner.optimizer))
        cores = network.cores or self.cores(row.ranks)
        return replace(
            own, compute_cpu=row.compute_cpu, cores=cores, local_size=network.local_size, bucket_mb=bucket_mb
        )

    def _bucket_sizes(self, policy: Policy, row: Measured | None) -> tuple[float, dict[int, float]]:
        """The size of a bucket in the row, and what each number of ranks would have: what the command line says, or who
        measured the row did (it is not what was usual there), or what is usual."""
        from hvdbridge.reduction.source import usual_bucket_mb

        nccl = self.device == "cuda" if self.job.nccl is None else self.job.nccl

        def usual(ranks: int, local_size: int) -> float:
            return usual_bucket_mb(policy, range(-(-ranks // local_size)), blocks_host=not nccl)

        said, local_size, ranks = self.arguments.bucket_mb, self.planner.local_size, self.arguments.ranks
        own = said or (row.bucket_mb if row else usual(max(ranks), local_size))
        if row and row.bucket_mb != usual(row.ranks, self.job.network.local_size):
            said = own
        return own, {n: said or usual(n, local_size) for n in ranks}


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Raises ConfigurationError: one cannot be."""
    from hvdbridge.tools.bench.checks import MOST_RANKS, check_number

    for ranks in arguments.ranks:
        check_number("--ranks", ranks, most=MOST_RANKS)
    check_number("--local-size", arguments.local_size, most=MOST_RANKS)
    for name in ("gbits", "local_gbits", "compute_ms", "bucket_mb", "cores"):
        check_number(f"--{name.replace('_', '-')}", getattr(arguments, name))
    for name in ("latency_us", "local_latency_us"):
        check_number(f"--{name.replace('_', '-')}", getattr(arguments, name), least=0)


def _job(arguments: argparse.Namespace, errors: Console) -> Job:
    """Raises ConfigurationError: no network; a file that is not what ``hvdbridge bench`` writes, or of another job."""
    from hvdbridge.tools.bench.transport import Network

    compute = None if arguments.compute_ms is None else arguments.compute_ms / 1e3
    local = None
    if arguments.local_latency_us is not None and arguments.local_gbits is None:
        raise ConfigurationError(f"--local-latency-us {arguments.local_latency_us:g} needs --local-gbits")
    if arguments.local_gbits is not None:
        local = (_seconds(arguments.local_latency_us, 5.0), arguments.local_gbits * 1e9 / 8)
    if arguments.source is not None:
        network_of_its_own = [
            f"--{name.replace('_', '-')}"
            for name in ("gbits", "latency_us")
            if getattr(arguments, name) is not None
        ]
        if network_of_its_own:
            raise ConfigurationError(
                f"{', '.join(network_of_its_own)} and --from {arguments.source}: which network? FILE has one"
            )
        if not arguments.source.exists():
            raise ConfigurationError(
                f"--from {arguments.source}: there is no such file. Without a launcher hvdbridge bench writes one for "
                "each backend, with -torch, -horovod or -mpi in its name."
            )
        try:
            saved = json.loads(arguments.source.read_text())
            every = [Measured.of(row, f"rows[{i}]") for i, row in enumerate(saved["rows"])]
            known = list(dict.fromkeys(row["model"] for row in saved["rows"]))
            model = arguments.model or (known[0] if len(known) == 1 else None)
            backend = saved["rows"][-1]["backend"]  # whose network it is
            measured = {
                row["policy"]: figures
                for row, figures in zip(saved["rows"], every, strict=True)
                if (row["model"], row["backend"]) == (model, backend)
            }
            network = Network.from_dict(saved["network"])
            most = max(row.ranks for row in every)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
            raise ConfigurationError(
                f"--from {arguments.source}: not what hvdbridge bench --json writes: {kind}{error}"
            ) from error
        if most == 1:
            raise ConfigurationError(
                f"--from {arguments.source}: one rank alone has measured no network. Start hvdbridge bench on several."
            )
        if model is None:
            raise ConfigurationError(f"--from {arguments.source} has {', '.join(known)}: say which by --model")
        samples = {row.samples for row in measured.values()} or {arguments.samples}
        if arguments.samples is not None and samples != {arguments.samples}:
            raise ConfigurationError(
                f"--samples {arguments.samples}: in {arguments.source} it was {samples.pop() or 'the default'}"
            )
        taken = f"rows of {model} with {backend}" if measured else f"the network alone: it has no row of {model}"
        errors.print(f"{arguments.source}: {taken}", highlight=False, markup=False, soft_wrap=True)
        if most <= network.local_size:
            errors.print(
                f"All {most} ranks were on one node: what several nodes take is predicted as if nothing slower lay "
                "between them. Measure there, or give --gbits in place of --from.", highlight=False, soft_wrap=True,
            )  # fmt: skip
        if local is not None:
            network = replace(network, local=Network.given(*local).lines)
        if compute is None and measured:
            compute = statistics.median(row.compute for row in measured.values())
        nccl = backend == "torch" and any(row.enqueued for row in measured.values())
        return Job(network, model, samples.pop(), compute, measured, nccl)
    if arguments.gbits is None:
        raise ConfigurationError(
            "which network? --gbits 10 --latency-us 30, or --from what hvdbridge bench --json wrote"
        )
    network = Network.given(_seconds(arguments.latency_us, 25.0), arguments.gbits * 1e9 / 8, local)
    return Job(network, arguments.model or "bert-base", arguments.samples, compute)


def _seconds(microseconds: float | None, otherwise: float) -> float:
    return (otherwise if microseconds is None else microseconds) / 1e6


@contextmanager
def _threads(cores: float) -> Iterator[None]:
    """As many threads as a rank would have, unless the environment says how many."""
    import torch

    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(int(cores), len(usable_cores()))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compute(backward: Callable[[], object], optimizer: Optimizer, repeats: int = 5) -> tuple[float, float, float]:
    """Seconds of forward and backward, seconds of the optimizer's step, CPU seconds of both; medians after one."""
    import torch

    times = []
    for _ in range(repeats + 1):
        moments = []
        optimizer.zero_grad()
        before = time.process_time()
        for part in (lambda: None, backward, optimizer.step):
            part()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            moments.append(time.perf_counter())
        times.append((moments[1] - moments[0], moments[2] - moments[1], time.process_time() - before))
    first, second, busy = (statistics.median(part) for part in zip(*times[1:], strict=True))
    return first, second, busy
