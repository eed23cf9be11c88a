"""Measure the CPU time per bucket of the scheduler and of whole policies, on a communicator that answers immediately.

    python benchmarks/scheduler.py

The row ``scheduler`` is a flow of one collective, from its submission to its end, through the scheduler's thread. The
other rows add the aggregator, its state and a policy. Tensors are so small (256 elements) that call overhead dominates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hvdbridge.backends.communicator import Answer, Communicator, Work
from hvdbridge.execution.flow import Submission
from hvdbridge.execution.scheduler import ThreadScheduler
from hvdbridge.policies import from_spec
from hvdbridge.policy.bucket import Layout
from hvdbridge.policy.collectives import AllGather, AllReduce, Collective
from hvdbridge.reduction.aggregator import Aggregator, SourceBucket

BUCKETS, ELEMENTS, STEPS = 16, 256, 300
POLICIES = ["mean", "bf16", "int8", "onebit", "topk:ratio=0.01", "powersgd:rank=4"]


class CompletedWork(Work):
    last = thread_safe_wait = True  # as Gloo's works have it

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Echo(Communicator):
    """A communicator of two ranks, of which the other one always sends the same tensor as this one."""

    rank, size = 0, 2

    def _answer(self, request: Collective) -> Answer:
        yield CompletedWork()
        tensor = request.tensor
        return torch.stack([tensor, tensor]) if isinstance(request, AllGather) else tensor

    def split(self, groups: object) -> None:
        raise NotImplementedError

    def control(self) -> Communicator:
        return self

    def close(self) -> None:
        pass


def one_collective(tensor: Tensor) -> Generator[Collective, Tensor, Tensor]:
    return (yield AllReduce(tensor))


def scheduler_alone() -> Callable[[], None]:
    scheduler, echo, tensor = ThreadScheduler(), Echo(), torch.ones(ELEMENTS)

    def step() -> None:
        flows = [scheduler.submit(Submission(one_collective(tensor), echo, rounds=1)) for _ in range(BUCKETS)]
        scheduler.flush()
        for flow in flows:
            flow.wait()

    return step


def policy(spec: str) -> Callable[[], None]:
    shape = (16, ELEMENTS // 16)
    params = {f"layer{i}.weight": torch.zeros(shape) for i in range(BUCKETS)}
    echo = Echo()
    context: Any = SimpleNamespace(
        communicator=echo, control=echo, scheduler=ThreadScheduler(), ranks=None, graphs=None
    )
    aggregator = Aggregator(from_spec(spec), params, context, weighted=False)
    buckets = [SourceBucket(Layout({name: shape}), torch.ones(ELEMENTS)) for name in params]

    def step() -> None:
        aggregator.begin()
        for number, bucket in enumerate(buckets, start=1):
            aggregator.submit(bucket, last=number == BUCKETS)
        aggregator.end()

    return step


def microseconds(step: Callable[[], None]) -> float:
    """Return the CPU time of all threads per bucket, in microseconds: the median over steps."""
    spent = []
    for _ in range(STEPS):
        started = time.process_time()
        step()
        spent.append(time.process_time() - started)
    return statistics.median(spent[STEPS // 5 :]) / BUCKETS * 1e6


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    table = Table("", "CPU µs per bucket")
    table.add_row("scheduler", f"{microseconds(scheduler_alone()):.0f}")
    for spec in POLICIES:
        table.add_row(spec, f"{microseconds(policy(spec)):.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
