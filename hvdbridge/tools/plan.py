"""``hvdbridge plan``: which policy to take, and what a step will take at more ranks than you have.

::

    hvdbridge plan --model small:4 --gbits 10 --latency-us 30
    hvdbridge plan --from bench.json     # model, network, computation, compression as `bench --json` found

With --from, a second table compares each measured step with its prediction, which uses the computation time of that
run. Forecasts use the median of all runs. With --gbits, they are for that link in place of FILE's network, with one
rank per node unless --local-size says more. A policy that is not in FILE is timed on this machine alone. To plan a
policy of your own, let the module of --model register it.

The last lines recommend, for each number of ranks, the first of --policies that is within 5 % of the fastest. The
default list begins with the policies that change a training least. The rule does not consider the loss, and not whether
`mean` is fast enough.

Without --from, the model is timed on this machine: with one thread if several ranks share a node, as hb.init() sets it,
else with one thread or a thread per core, whichever is faster. OMP_NUM_THREADS decides if it is set. If the cores are
busy, pass the column "compute" of hvdbridge bench as --compute-ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.startup.world import usable_cores

if TYPE_CHECKING:
    from hvdbridge.policy.base import Policy
    from hvdbridge.tools.bench.cost import Planner, Prediction
    from hvdbridge.tools.bench.transport import Network

RANKS = (2, 4, 8, 16, 64, 256)
# Those that change a training recipe least come first, because a recommendation takes the first of the fast ones.
# onebit fails behind SGD with momentum unless its rate is lowered; under local_sgd replicas drift (convergence.md).
POLICIES = [
    "mean", "bf16", "int8", "int4", "powersgd:rank=4", "topk:ratio=0.01", "onebit", "local_sgd:every=8",
]  # fmt: skip
LEAST = {
    "local_size": None, "gbits": None, "local_gbits": None, "compute_ms": None, "bucket_mb": None, "cores": None,
    "latency_us": 0, "local_latency_us": 0,
}  # fmt: skip
"""Option -> its least value; None: any positive number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hvdbridge plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    option = parser.add_argument
    option("--model", help="model, as in hvdbridge bench (default: FILE's, if it has one, else bert-base)")
    option("--policies", nargs="+", metavar="SPEC", help=f"policies to compare (default: {' '.join(POLICIES)})")
    option("--ranks", nargs="+", type=int, default=list(RANKS), metavar="N", help="numbers of ranks")
    option("--local-size", type=int, help="ranks per node (default: as in FILE; 1 without it or with --gbits)")
    option("--from", type=Path, dest="source", metavar="FILE", help="a file that hvdbridge bench --json wrote")
    option("--gbits", type=float, help="rate of the network between nodes, Gbit/s; in place of FILE's network")
    option("--latency-us", type=float, help="latency of a message between nodes (default: 25); needs --gbits")
    option("--local-gbits", type=float, help="rate inside a node, Gbit/s (default: FILE's, or that between nodes)")
    option("--local-latency-us", type=float, help="latency inside a node (default: 5); needs --local-gbits")
    text = (
        "time of a step without synchronization on the planned machines, such as bench's column compute; scales "
        "policies, too (default: measured). With k micro-batches per step give k times bench's. The plan then overlaps "
        "communication with all k; a job overlaps it with the last one only"
    )
    option("--compute-ms", type=float, help=text)
    option("--samples", type=int, help="images or tokens per step and rank")
    option("--bucket-mb", type=float, help="size in MiB (default: FILE's if its run was given one, else the policy's)")
    text = (
        "cores per rank (default: as --from says, else those of this machine for each of its ranks; with "
        "--compute-ms at least as many as computing keeps busy)"
    )
    option("--cores", type=float, help=text)
    option("--json", type=Path, metavar="FILE", help="write all figures")
    option("--plot", type=Path, metavar="FILE", help="draw the figures (needs matplotlib)")


@dataclass(frozen=True)
class Measured:
    """The fields of a row of ``hvdbridge bench`` that a plan needs; :class:`hvdbridge.tools.bench.measure.Row`
    documents them."""

    backend: str
    model: str
    policy: str
    ranks: int
    step: float
    compute: float
    compression: float
    cpu: float
    compute_cpu: float
    bucket_mb: float
    enqueued: bool
    samples: int | None = None


@dataclass(frozen=True)
class Job:
    """The job to predict, as the command line or the file of ``hvdbridge bench`` describes it.

    Attributes:
        compute: seconds of a step without synchronization; None: this machine measures them.
        rows: policy spec -> its row of the file.
        measured: the file's network, if ``network`` is another one; None: ``network``.
        nccl: the file's backend used NCCL; None: without a file, NCCL is assumed if this machine has CUDA.
    """

    network: Network
    model: str
    samples: int | None
    compute: float | None = None
    rows: Mapping[str, Measured] = field(default_factory=dict)
    nccl: bool | None = None
    measured: Network | None = None


def run(arguments: argparse.Namespace) -> int:
    """Print the predictions; return status 0, or 2 if no policy could be predicted."""
    from hvdbridge.policies import from_spec
    from hvdbridge.tools.bench import report
    from hvdbridge.tools.bench.checks import MOST_RANKS, check_file, check_number, check_policies
    from hvdbridge.tools.bench.models import check_name

    for ranks in arguments.ranks:
        check_number("--ranks", ranks, most=MOST_RANKS)
    for name, least in LEAST.items():
        check_number(_option(name), getattr(arguments, name), least, MOST_RANKS if name == "local_size" else 1e18)
    report.check_plot(arguments.plot)
    errors, console = Console(stderr=True), Console(soft_wrap=True)
    job = _job(arguments) if arguments.source is None else _job_of_file(arguments, errors)
    check_name(job.model, job.samples)
    check_policies(arguments.policies or [], [job.model])
    check_file("--json", arguments.json)
    check_file("--plot", arguments.plot)
    plan = _Plan(arguments, job, console)
    specs = arguments.policies or list(dict.fromkeys([*POLICIES, *job.rows]))
    with _restored_threads():
        plan.measure(errors, measured=job.rows.keys() >= set(specs))
        ordered = sorted(specs, key=lambda spec: spec not in job.rows)  # rows give the overhead of policies without one
        tracked = track(ordered, "arithmetic", console=errors, transient=True, disable=not errors.is_terminal)
        for number, spec in enumerate(tracked, start=1):
            if not errors.is_terminal:
                errors.print(f"arithmetic of {spec} ({number} of {len(ordered)})", highlight=False, markup=False)
            try:
                plan.add(spec, from_spec(spec))
            except (ConfigurationError, Unsupported) as error:  # another model's module may register FILE's policies
                console.print(f"{spec}: left out: {error}", markup=False)
    if not plan.predictions:
        return 2
    plan.predictions.sort(key=lambda prediction: specs.index(prediction.policy))
    plan.report()
    return 0


class _Plan:
    """Collect the predictions of one job, policy by policy.

    Attributes:
        predictions: those of each policy at each number of ranks.
        comparisons: for each row of the file, its prediction and the measured seconds of its step.
        overheads: CPU seconds of each row's step beyond its prediction; a policy without a row has the least of them.
        scale: planned computation time divided by the time measured on this machine.
        here: how the computation was measured on this machine, in words.
        planner: the job except for cores, overhead and bucket size, which depend on policy and ranks.
    """

    scale: float
    here: str
    planner: Planner

    def __init__(self, arguments: argparse.Namespace, job: Job, console: Console) -> None:
        import torch

        self.arguments, self.job, self.console = arguments, job, console
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.local_size = arguments.local_size or job.network.local_size
        self.min_cores = 0.0
        self.predictions: list[Prediction] = []
        self.comparisons: list[tuple[Prediction, float]] = []
        self.overheads: list[float] = []

    def cores(self, ranks: int) -> float:
        """Return the cores per rank; at most ``ranks`` ranks share a machine."""
        network = self.job.network
        machine = len(usable_cores()) if network.cores is None else network.cores * network.local_size
        return float(self.arguments.cores or max(self.min_cores, machine / min(self.local_size, ranks)))

    def threads(self) -> list[int]:
        """Return the numbers of threads to measure with; the fastest counts.

        A rank has one thread if ranks share its node, as ``hb.init()`` sets it, else one per core. On cores that other
        programs use, threads wait for each other, and one thread can be a hundred times as fast as two.
        """
        import torch

        if "OMP_NUM_THREADS" in os.environ:
            return [torch.get_num_threads()]
        ranks = max(self.arguments.ranks)
        cores = 1 if min(self.local_size, ranks) > 1 else max(1, min(int(self.cores(ranks)), len(usable_cores())))
        return sorted({1, cores})

    def measure(self, errors: Console, measured: bool) -> None:
        """Time forward, backward and optimizer of the model on this machine; set ``scale``, ``here``, ``planner``.

        Args:
            measured: every policy has a row, so that no prediction rests on these times alone: do not warn of them.
        """
        from torch.optim import SGD

        from hvdbridge.reduction.parameters import trainable
        from hvdbridge.reduction.source import prefer_bucket_views
        from hvdbridge.tools.bench.cost import Planner, measure_copy, medians
        from hvdbridge.tools.bench.models import model

        job = self.job
        errors.print(f"timing {job.model} on this machine", highlight=False, markup=False, soft_wrap=True)
        module, loss = model(job.model, job.samples)
        module.to(self.device)
        params = {name: p.detach() for name, p in trainable(module).items()}
        sgd = SGD(module.parameters(), lr=1e-6)
        threads, rounds = _fastest(self.threads(), sgd.zero_grad, lambda: loss(module).backward(), sgd.step)
        (passes, busy), (optimizer, more) = map(medians, rounds[1:])
        self.here, varied = _measured_here(threads, [p + o for (p, _), (o, _) in zip(*rounds[1:], strict=True)])
        errors.print(self.here, highlight=False, markup=False, soft_wrap=True)
        if varied and not measured:
            subject = "Predictions of policies without a row in FILE" if job.rows else "Predictions"
            remedy = "" if job.compute else ", or give --compute-ms: hvdbridge bench has it in the column compute"
            errors.print(
                "Warning: the quartiles differ by more than a factor of 2. Other programs seem to use the cores. "
                f"{subject} may be wrong by as much. Repeat this on an idle machine{remedy}.",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        compute = passes + optimizer if job.compute is None else job.compute
        scale = self.scale = compute / (passes + optimizer)  # the planned machine scales all computation alike
        shares = [row.compute_cpu / row.compute for row in job.rows.values()]
        cpu = compute * statistics.median(shares) if shares else scale * (busy + more)
        if self.arguments.compute_ms is not None:  # the given time implies the cores that computing keeps busy
            self.min_cores = cpu / compute
        copies = measure_copy(self.device) * sum(p.numel() for p in params.values())
        copies *= 1 if prefer_bucket_views(module.parameters()) else 2
        self.planner = Planner(  # backward takes two matrix products for each one of forward
            params, scale * passes / 3, scale * passes * 2 / 3, job.network, local_size=self.local_size,
            optimizer=scale * optimizer, copies=scale * copies, compute_cpu=cpu, one_device=self.device == "cuda",
        )  # fmt: skip

    def add(self, spec: str, policy: Policy) -> None:
        """Predict ``policy``; raises ConfigurationError or Unsupported if it is not defined or cannot be timed."""
        from hvdbridge.tools.bench.cost import measure_computation, step_kinds

        row = self.job.rows.get(spec)
        measured_mb, planned_mb = self._bucket_sizes(policy, row)
        computation = measure_computation(policy, self.planner.params, measured_mb, self.device, self.local_size)
        factor, overhead = self.scale, min(self.overheads, default=0.0)
        if row:
            row_planner = self._as_measured(row, measured_mb)
            if not row.enqueued and step_kinds(policy)[1] in (0, 1):  # the row's compression is that of every step
                unscaled = row_planner.predict(spec, policy, row.ranks, computation)
                factor = row.compression / unscaled.compression if unscaled.compression else self.scale
                overhead = row.cpu - row_planner.predict(spec, policy, row.ranks, computation, factor).cpu
                self.overheads.append(overhead)
            row_planner = replace(row_planner, overhead=overhead)
        for ranks in self.arguments.ranks:
            try:
                planner = replace(self.planner, bucket_mb=planned_mb[ranks], cores=self.cores(ranks), overhead=overhead)
                self.predictions.append(planner.predict(spec, policy, ranks, computation, factor))
            except (ConfigurationError, Unsupported) as error:
                self.console.print(f"{spec}, {ranks} ranks: left out: {error}", markup=False)
        if row:
            self.comparisons.append((row_planner.predict(spec, policy, row.ranks, computation, factor), row.step))

    def _as_measured(self, row: Measured, bucket_mb: float) -> Planner:
        """Return the planner for the machine and the computation time of a row."""
        planner, network = self.planner, self.job.measured or self.job.network
        scaled = planner.scaled(row.compute / (planner.forward + planner.backward + planner.optimizer))
        cores = network.cores or self.cores(row.ranks)
        return replace(
            scaled, network=network, compute_cpu=row.compute_cpu, cores=cores, local_size=network.local_size,
            bucket_mb=bucket_mb,
        )  # fmt: skip

    def _bucket_sizes(self, policy: Policy, row: Measured | None) -> tuple[float, dict[int, float]]:
        """Return the bucket size (MiB) of the row, and a map from number of ranks to its bucket size.

        The option ``--bucket-mb`` decides, else a size of the row that is not the usual one, else the usual size.
        """
        from hvdbridge.reduction.source import default_bucket_mb

        nccl = self.device == "cuda" if self.job.nccl is None else self.job.nccl

        def usual(ranks: int, local_size: int) -> float:
            return default_bucket_mb(policy, range(-(-ranks // local_size)), blocks_host=not nccl)

        explicit, ranks = self.arguments.bucket_mb, self.arguments.ranks
        row_size = explicit or (row.bucket_mb if row else usual(max(ranks), self.local_size))
        if row and row.bucket_mb != usual(row.ranks, (self.job.measured or self.job.network).local_size):
            explicit = row_size
        return row_size, {n: explicit or usual(n, self.local_size) for n in ranks}

    def report(self) -> None:
        """Print the tables and a recommendation for each number of ranks; write the files of --json and --plot."""
        from hvdbridge.tools.bench import report

        report.show(report.predicted(self.predictions))
        if self.comparisons:
            report.show(report.compared(self.comparisons))
        planned = sorted({prediction.ranks for prediction in self.predictions})
        for ranks in planned:
            self.console.print(report.recommend(self.predictions, ranks), highlight=False, markup=False)
        given = self.arguments.compute_ms is not None
        origin = " as given" if given else "" if self.job.compute is None else " as in FILE"
        per_rank = " to ".join(f"{n:.3g}" for n in sorted({self.cores(planned[0]), self.cores(planned[-1])}))
        self.console.print(
            "Step times say nothing of what a policy does to the loss: see docs/explanation/convergence.md. "
            f"Computation {1e3 * self.predictions[0].compute:.1f} ms a step{origin}, {per_rank} cores per rank. "
            f"{self.here}",
            highlight=False,
        )
        if self.arguments.json is not None:
            report.save(self.arguments.json, self.job.network, self.predictions, model=self.job.model)
        if self.arguments.plot is not None:
            report.plot_predicted(self.arguments.plot, self.predictions)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _job(arguments: argparse.Namespace) -> Job:
    """Return the job of the command line alone; raises ConfigurationError if it gives no network."""
    from hvdbridge.tools.bench.transport import Network

    local = _local(arguments)
    if arguments.gbits is None:
        raise ConfigurationError(
            "name the network: --gbits 10 --latency-us 30, or --from a file of hvdbridge bench --json"
        )
    network = Network.given(*_link(arguments.latency_us, 25.0, arguments.gbits), local)
    return Job(network, arguments.model or "bert-base", arguments.samples, _compute(arguments))


def _job_of_file(arguments: argparse.Namespace, errors: Console) -> Job:
    """Return the job of ``--from FILE``; raises ConfigurationError for a malformed file, or that of another job."""
    from hvdbridge.tools.bench.transport import Network

    local, compute, source = _local(arguments), _compute(arguments), f"--from {arguments.source}"
    if arguments.latency_us is not None and arguments.gbits is None:
        raise ConfigurationError(f"--latency-us {arguments.latency_us:g} and {source}: it needs --gbits")
    network, all_rows = measured, _ = _read(arguments.source)
    models = list(dict.fromkeys(row.model for row in all_rows))
    model = arguments.model or (models[0] if len(models) == 1 else None)
    backend, most_ranks = all_rows[-1].backend, max(row.ranks for row in all_rows)  # the network is the last row's
    if most_ranks == 1:
        raise ConfigurationError(
            f"{source}: one rank alone has measured no network. Start hvdbridge bench on several."
        )
    if model is None:
        raise ConfigurationError(f"{source} has {', '.join(models)}: say which by --model")
    rows = {row.policy: row for row in all_rows if (row.model, row.backend) == (model, backend)}
    samples = {row.samples for row in rows.values()} or {arguments.samples}
    if arguments.samples is not None and samples != {arguments.samples}:
        raise ConfigurationError(
            f"--samples {arguments.samples}: in {arguments.source} it was {samples.pop() or 'the default'}"
        )
    used = f"rows of {model} with {backend}" if rows else f"the network alone: it has no row of {model}"
    errors.print(f"{arguments.source}: {used}", highlight=False, markup=False, soft_wrap=True)
    one_node = most_ranks <= network.local_size
    if arguments.gbits is not None:  # the file's machine, with another link between nodes
        link = Network.given(*_link(arguments.latency_us, 25.0, arguments.gbits))
        machine = None if network.cores is None else network.cores * network.local_size
        network = replace(link, local=network.local or (network.lines if one_node else None), cores=machine)
    elif one_node:
        errors.print(
            f"All {most_ranks} ranks were on one node: what several nodes take is predicted as if nothing slower lay "
            "between them. Measure there, or give their link by --gbits.", highlight=False, soft_wrap=True,
        )  # fmt: skip
    if local is not None:
        network = replace(network, local=Network.given(*local).lines)
    if compute is None and rows:
        compute = statistics.median(row.compute for row in rows.values())
    nccl = backend == "torch" and any(row.enqueued for row in rows.values())
    return Job(network, model, samples.pop(), compute, rows, nccl, measured)


def _read(path: Path) -> tuple[Network, list[Measured]]:
    """Return the network and the rows of a file; raises ConfigurationError if ``hvdbridge bench`` did not write it."""
    from hvdbridge.tools.bench.checks import read
    from hvdbridge.tools.bench.transport import Network

    if not path.exists():
        raise ConfigurationError(
            f"--from {path}: there is no such file. Without a launcher hvdbridge bench writes one for "
            "each backend, with -torch, -horovod or -mpi in its name."
        )
    try:
        saved = json.loads(path.read_text())
        rows = [read(Measured, row, f"rows[{i}]") for i, row in enumerate(saved["rows"])]
        network = Network.from_dict(saved["network"])
        if not rows:
            raise ConfigurationError("it has no rows")
        return network, rows
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
        raise ConfigurationError(f"--from {path}: not what hvdbridge bench --json writes: {kind}{error}") from error


def _compute(arguments: argparse.Namespace) -> float | None:
    return None if arguments.compute_ms is None else arguments.compute_ms / 1e3


def _local(arguments: argparse.Namespace) -> tuple[float, float] | None:
    """Return seconds of latency and bytes per second inside a node; None if the command line has neither."""
    if arguments.local_gbits is not None:
        return _link(arguments.local_latency_us, 5.0, arguments.local_gbits)
    if arguments.local_latency_us is not None:
        raise ConfigurationError(f"--local-latency-us {arguments.local_latency_us:g} needs --local-gbits")
    return None


def _link(microseconds: float | None, default: float, gbits: float) -> tuple[float, float]:
    """Return latency in seconds and bandwidth in bytes per second."""
    return (default if microseconds is None else microseconds) / 1e6, gbits * 1e9 / 8


def _fastest(
    threads: Sequence[int], *functions: Callable[[], object]
) -> tuple[int, list[list[tuple[float, float]]]]:
    """Time functions with each number of threads; return the fastest number, which stays set, and its rounds.

    A number whose first rounds take longer than the best so far is not measured further.
    """
    import torch

    from hvdbridge.tools.bench.cost import medians, time_rounds

    def seconds(rounds: list[list[tuple[float, float]]]) -> float:
        return sum(medians(runs)[0] for runs in rounds)

    best = 0
    best_rounds: list[list[tuple[float, float]]] = []
    for number in threads:
        torch.set_num_threads(number)
        if best and seconds(time_rounds(*functions, repeats=2)) > seconds(best_rounds):
            continue
        rounds = time_rounds(*functions)
        if not best or seconds(rounds) < seconds(best_rounds):
            best, best_rounds = number, rounds
    torch.set_num_threads(best)
    return best, best_rounds


def _measured_here(threads: int, steps: Sequence[float]) -> tuple[str, bool]:
    """Return a sentence on the computation that was measured, and whether its quartiles differ by a factor above 2.

    >>> _measured_here(1, [0.010, 0.011, 0.012, 0.013, 0.014])
    ('This machine computes a step in 12.0 ms (1 thread, median of 5; quartiles 11.0 to 13.0).', False)
    """
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
    text = (
        f"This machine computes a step in {1e3 * middle:.1f} ms ({threads} thread{'s' * (threads > 1)}, "
        f"median of {len(steps)}; quartiles {1e3 * low:.1f} to {1e3 * high:.1f})."
    )
    return text, high > 2 * low


@contextmanager
def _restored_threads() -> Iterator[None]:
    """Restore torch's number of threads at exit."""
    import torch

    previous = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(previous)
