"""``hvdbridge plan``: which policy to take, and what a step will take with up to 100,000 ranks.

::

    hvdbridge plan --model bert-base --gbits 10 --latency-us 30
    hvdbridge plan --model gpt2 --from bench.json     # network and computation as `hvdbridge bench --json` found them
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track

from hvdbridge.errors import ConfigurationError

RANKS = (2, 4, 8, 16, 64, 256, 1024, 4096, 16384, 100_000)
# From the simplest to those that ask most of a training's recipe: docs/policies.md
POLICIES = [
    "mean", "bf16", "int8", "int4", "topk:ratio=0.01", "onebit", "powersgd:rank=4", "local_sgd:every=8",
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("--model", default="bert-base", help="as in hvdbridge bench")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="SPEC")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), metavar="N")
    parser.add_argument("--local-size", type=int, default=1, help="ranks per node (default: %(default)s)")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="what hvdbridge bench --json wrote")
    parser.add_argument("--gbits", type=float, help="the network's rate between nodes, Gbit/s")
    parser.add_argument("--latency-us", type=float, default=25.0, help="of one message (default: %(default)s)")
    parser.add_argument("--local-gbits", type=float, help="inside a node (default: as between them)")
    parser.add_argument("--local-latency-us", type=float, default=5.0, help="(default: %(default)s)")
    parser.add_argument(
        "--compute-ms", type=float, help="a step without synchronization (default: forward and backward, measured here)"
    )
    parser.add_argument("--samples", type=int, help="images or tokens per step and rank")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="(default: %(default)s)")
    parser.add_argument("--cores", type=float, help="cores per rank (default: those of this machine per local rank)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from hvdbridge.bench import report
    from hvdbridge.bench.models import model
    from hvdbridge.bench.network import Network
    from hvdbridge.bench.predict import Planner, measure_arithmetic
    from hvdbridge.policies import from_spec

    if min(*arguments.ranks, arguments.local_size, 1) < 1:
        raise ConfigurationError("--ranks and --local-size must be positive")
    compute = None if arguments.compute_ms is None else arguments.compute_ms / 1e3
    if arguments.source is not None:
        try:
            saved = json.loads(arguments.source.read_text())
            network = Network.from_dict(saved["network"])
            computes = [float(row["compute"]) for row in saved["rows"] if row["model"] == arguments.model]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"--from {arguments.source}: not what hvdbridge bench --json writes: {type(error).__name__}: {error}"
            ) from error
        if compute is None and computes:
            compute = computes[0]
    elif arguments.gbits is not None:
        local = None
        if arguments.local_gbits is not None:
            local = (arguments.local_latency_us / 1e6, arguments.local_gbits * 1e9 / 8)
        network = Network.given(arguments.latency_us / 1e6, arguments.gbits * 1e9 / 8, local)
    else:
        raise ConfigurationError(
            "which network? --gbits 10 --latency-us 30, or --from what hvdbridge bench --json wrote"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module, loss = model(arguments.model, arguments.samples)
    module.to(device)
    if compute is None:
        compute = _compute(lambda: loss(module).backward())
    params = {name: tuple(p.shape) for name, p in module.named_parameters()}
    cores = arguments.cores or (os.cpu_count() or 1) / arguments.local_size
    planner = Planner(
        params, compute / 3, compute * 2 / 3, network, arguments.bucket_mb, arguments.local_size, cores
    )  # backward is two of three products
    found = []
    console = Console(width=None if Console().is_terminal else 170)
    for spec in track(arguments.policies, "arithmetic", console=Console(stderr=True), transient=True):
        policy = from_spec(spec)
        try:
            arithmetic = measure_arithmetic(policy, params, arguments.bucket_mb, device=device)
        except ConfigurationError as error:
            console.print(f"{spec}: left out: {error}")
            continue
        for ranks in sorted(set(arguments.ranks)):
            try:
                found.append(planner.predict(spec, policy, ranks, arithmetic))
            except ConfigurationError as error:
                console.print(f"{spec}, {ranks} ranks: left out: {error}")
    console.print(report.predicted(found))
    for ranks in sorted({one.ranks for one in found}):
        console.print(report.recommend(found, ranks), highlight=False)
    console.print(
        "Step times say nothing of what a policy does to the loss: docs/policies.md has that. "
        f"Computation {1e3 * compute:.1f} ms a step, {cores:g} cores per rank.", highlight=False,
    )  # fmt: skip
    if arguments.json is not None:
        report.save(arguments.json, network, found, model=arguments.model)
    if arguments.plot is not None:
        report.plot_predicted(arguments.plot, found)
    return 0


def _compute(step: object, repeats: int = 5) -> float:
    """Seconds of forward and backward on this machine, median after one."""
    import statistics

    import torch

    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        step()  # type: ignore[operator]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
