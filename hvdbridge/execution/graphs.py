"""Flows as CUDA graphs: a bucket's flow is captured once, NCCL's collectives included, and replayed in later steps.

Rules:

1. A stage of a bucket is the set of steps in which its flow takes the same decisions (:meth:`Bucket.decide
   <hvdbridge.policy.bucket.Bucket.decide>`). Decisions depend on the step number and on all ranks' weights alone, so
   ranks agree on the stage of a step without communication.
2. The first :data:`WARM_RUNS` flows of a stage run as they are. After that NCCL is connected, kernels are compiled, and
   all tables and states of the bucket exist, which must lie outside of the graphs' memory.
3. The next flow is captured. In that step and in the stage's next one, the flow also runs as it is, on the same
   gradients and state, and the graph must give the same results. Ranks agree on this before they rely on it: the
   failure of one rank turns graphs off on all ranks, with one warning. Such a step keeps the results of the flow.
4. Gradients and state keep their addresses (:attr:`StateStore.in_place`). If they do not, all stages begin anew. Where
   only the gradients' address differs, they are copied, because other ranks may not know of it.
5. What differs between the steps of a stage reaches the graph through one :class:`Table` on the device, which the host
   fills before the first replay of a step (:meth:`Bucket.number`, :meth:`Bucket.integers`). A captured flow that reads
   the step number or the weights in another way raises :class:`NotCapturable`.
6. All graphs of a synchronizer share one memory pool and one stream. No tensor of the pool is read after a replay.
7. NCCL's watchdog does not see replays. Once per step a thread waits for them, under the monitor's time limit.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Answer, Communicator, Watch, Work
from hvdbridge.execution.flow import Task, Waiter
from hvdbridge.execution.scheduler import Scheduler, StreamScheduler
from hvdbridge.execution.state_store import StateStore
from hvdbridge.policy.bucket import Bucket, Layout, Number, Ranks, Weights
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.collectives import AllReduce, Collective, ReduceScatter, relay

log = logging.getLogger("hvdbridge")

WARM_RUNS = 2
"""Number of flows of a stage that run before one is captured: the first compiles and connects, the second shows that
the first has left nothing to do."""

VERIFIED_RUNS = 2
"""Number of replays of a stage that are compared with the flow: the second has other seeds, weights and gradients."""

MOST_STAGES = 16
"""Largest number of stages per bucket. Later ones run as they are."""

TABLE_ROWS = 1 << 14
"""Numbers and integers that all graphs of a synchronizer can read."""

Choice = Callable[[int, Weights], Any]
Compute = Callable[[int, Ranks], Sequence[int]]
Run = Callable[[Bucket], Task[Tensor]]
"""Runs a bucket's flow and merges its state; the update that it returns lies in the bucket's buffer."""


class NotCapturable(Exception):
    """The flow cannot run as a graph. The message says why."""


class Graph(Protocol):
    """A captured flow. :class:`CudaGraph`, or the recorder of the tests, which replays on a CPU."""

    def capture(self) -> AbstractContextManager[None]:
        """Return the context in which the flow is captured."""

    def answer(self, request: Collective) -> Answer:
        """Answer a request of the flow while it is captured."""

    def replay(self) -> Task[None]:
        """Run the captured operations. Collectives that are not captured are requested from the scheduler."""

    def reset(self) -> None:
        """Free the graph."""


class CudaGraph:
    """A CUDA graph. ``pool``: the handle of the memory that it shares with other graphs."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    @contextmanager
    def capture(self) -> Iterator[None]:
        # Other threads may call CUDA meanwhile (a loader that pins memory), so only this thread is restricted
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the capture is invalid because of the first error
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    def answer(self, request: Collective) -> Answer:
        return (yield request)  # type: ignore[misc,return-value]

    def replay(self) -> Task[None]:
        self._graph.replay()
        return
        yield

    def reset(self) -> None:
        self._graph.reset()


class Table:
    """Numbers of one step, which the host writes and graphs read: int64 ``[TABLE_ROWS]`` on ``device``.

    There are two pinned copies, because the device may read one while the host already writes those of the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(TABLE_ROWS, dtype=torch.int64, device=device)
        self.used = 0
        pinned = device.type == "cuda"
        self._copies = [torch.zeros(TABLE_ROWS, dtype=torch.int64, pin_memory=pinned, device="cpu") for _ in range(2)]
        self._read = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._written = 0

    def allocate(self, count: int) -> Tensor:
        """Return the next ``count`` rows.

        Raises:
            NotCapturable: the table is full.
        """
        if self.used + count > TABLE_ROWS:
            raise NotCapturable(f"flows read more than {TABLE_ROWS} numbers per step")
        self.used += count
        return self.values[self.used - count : self.used]

    def write(self, values: Sequence[int]) -> None:
        """Set the first rows, on the current stream. The host waits for the copy of the step before the last one."""
        copy, read = self._copies[self._written % 2], self._read[self._written % 2]
        self._written += 1
        if read is not None:
            read.synchronize()
        copy[: len(values)] = torch.tensor(values, dtype=torch.int64, device="cpu")
        self.values[: len(values)].copy_(copy[: len(values)], non_blocking=True)
        if read is not None:
            read.record()


def bits(number: float) -> int:
    """Return the bits of a double as an int64.

    >>> torch.tensor([bits(0.1)]).view(torch.float64).item()
    0.1
    """
    return int(struct.unpack("q", struct.pack("d", number))[0])


@dataclass(eq=False)
class Trace:
    """What one run of a flow read.

    Attributes:
        decisions: each decision with its value.
        table: provides the numbers of a captured flow; None: the flow runs as it is.
        rows: first row, number of rows, and function of each number or list of integers.
        sums: the flow has summed floats over ranks, of which libraries may round the terms in another order.
    """

    decisions: list[tuple[Choice, Any]] = field(default_factory=list)
    table: Table | None = None
    rows: list[tuple[int, int, Compute]] = field(default_factory=list)
    sums: bool = False

    def read(self, count: int, compute: Compute) -> Tensor:
        """Return the rows with the values of ``compute``, int64 ``[count]``."""
        assert self.table is not None
        self.rows.append((self.table.used, count, compute))
        return self.table.allocate(count)


def _refuse(*_: object) -> Any:
    raise NotCapturable(
        "its policy reads Bucket.step or the ranks' weights. "
        "Use Bucket.decide, Bucket.number or Bucket.integers, which a graph can replay"
    )


OPERATIONS = (
    "int index float bool str repr format hash eq ne lt le gt ge add radd sub rsub mul rmul mod rmod floordiv "
    "rfloordiv truediv rtruediv pow rpow divmod rdivmod neg lshift rshift and or xor"
)
Unreadable = type("Unreadable", (), {f"__{name}__": _refuse for name in OPERATIONS.split()})
"""The step number of a captured flow. Each use raises :class:`NotCapturable`; copies of a bucket may have it."""


class TracedRanks(Ranks):
    """The ranks and weights of a traced bucket, unless a policy has replaced them."""


class CapturedRanks(TracedRanks):
    """The same in a captured flow. Reading the weights raises :class:`NotCapturable`."""

    def __getattribute__(self, name: str) -> Any:
        return _refuse() if name == "weights" else super().__getattribute__(name)


@dataclass(eq=False)
class TracedBucket(Bucket):
    """A bucket that records what its flow reads of the step. ``origin``: the bucket with the values of this step."""

    trace: Trace = field(default_factory=Trace)
    origin: Bucket = field(default_factory=lambda: Bucket(torch.empty(0), Layout({})))

    @classmethod
    def of(cls, bucket: Bucket, trace: Trace) -> TracedBucket:
        """Return ``bucket`` as one whose flow records into ``trace``."""
        given = {item.name: getattr(bucket, item.name) for item in fields(Bucket)}
        kind = TracedRanks if trace.table is None else CapturedRanks
        given["ranks"] = kind(**{item.name: getattr(bucket.ranks, item.name) for item in fields(Ranks)})
        if trace.table is not None:
            given |= {"step": Unreadable(), "pool": BufferPool()}
        return cls(**given, trace=trace, origin=bucket)

    def decide(self, choose: Callable[[int, Weights], Any]) -> Any:
        if not isinstance(self.ranks, TracedRanks):  # a policy's own, whose weights it has decided
            weights, of_these = self.ranks.weights, choose

            def choose(step: int, _: Weights) -> Any:
                return of_these(step, weights)

        value = choose(self.origin.step, self.origin.weights)
        self.trace.decisions.append((choose, value))
        return value

    def number(self, compute: Callable[[Ranks], float]) -> Number:
        if self.trace.table is None or not isinstance(self.ranks, TracedRanks):
            return compute(self.origin.ranks if isinstance(self.ranks, TracedRanks) else self.ranks)
        return self.trace.read(1, lambda _, ranks: [bits(compute(ranks))]).view(torch.float64)[0]

    def integers(self, compute: Callable[[int], Sequence[int]]) -> Sequence[int] | Tensor:
        values = compute(self.origin.step)
        if self.trace.table is None:
            return values
        return self.trace.read(len(values), lambda step, _: compute(step))


@dataclass(eq=False)
class Stage:
    """The flows of a bucket that take the same decisions (rule 1).

    Attributes:
        decisions: each decision with its value.
        runs: number of flows that have run as they are.
        verified: number of replays that were equal to the flow.
        graph: the captured flow, with the ``buffer`` in which it finds the gradients, and the table's ``rows``.
        exact: the graph must give the same bits.
        collectives, bytes_sent: of one flow.
    """

    decisions: list[tuple[Choice, Any]]
    runs: int = 0
    verified: int = 0
    graph: Graph | None = None
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: list[tuple[int, int, Compute]] = field(default_factory=list)
    exact: bool = True
    collectives: int = 0
    bytes_sent: int = 0

    def matches(self, step: int, weights: Weights) -> bool:
        """Return whether the flow of a step takes the decisions of this stage."""
        return all(choose(step, weights) == value for choose, value in self.decisions)


class ReplayWork(Work):
    """The replays of one step on the current stream, which a thread waits for under the monitor's limit (rule 7)."""

    def __init__(self, watch: Watch) -> None:
        self._event, self._watch = torch.cuda.current_stream().record_event(), watch

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        with self._watch("collectives in CUDA graphs"):
            self._event.synchronize()


class FlowGraphs:
    """The graphs of one synchronizer's flows.

    Args:
        scheduler: runs the flows; all on one stream, one after another.
        communicator: carries the data.
        control: by which ranks agree.
        device: of the gradients.
        graph: constructs an empty graph.
    """

    def __init__(
        self, scheduler: Scheduler, communicator: Communicator, control: Communicator, device: torch.device,
        graph: Callable[[], Graph],
    ) -> None:  # fmt: skip
        self.off: str | None = None  # the reason why flows run as they are
        self._scheduler, self._communicator, self._control = scheduler, communicator, control
        self._table, self._new_graph = Table(device), graph
        self._stages: dict[int, tuple[Layout, list[Stage]]] = {}  # by index of the bucket
        self._active: dict[int, Stage] = {}  # of the current step
        self._step = -1
        self._generation = -1
        self._waiter = Waiter(lambda: None)

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return sum(stage.graph is not None for _, stages in self._stages.values() for stage in stages)

    def run(self, bucket: Bucket, store: StateStore, flow: Run) -> Task[Tensor]:
        """Run the flow of a bucket, as it is or as a graph; return its update, in the bucket's buffer."""
        if self.off is not None:
            return (yield from flow(bucket))
        known = self._stages.get(bucket.index)
        if store.generation != self._generation or (known is not None and known[0] is not bucket.layout):
            self._forget()
            self._generation = store.generation
        if bucket.step != self._step:
            self._step = bucket.step
            self._active = {}
            for index, (_, stages) in self._stages.items():
                matching = (stage for stage in stages if stage.matches(bucket.step, bucket.weights))
                if (stage := next(matching, None)) is not None:
                    self._active[index] = stage
            self._fill(bucket)
        active = self._active.get(bucket.index)
        if active is None or active.runs < WARM_RUNS:
            return (yield from self._run_warm(active, bucket, flow))
        if active.verified < VERIFIED_RUNS:
            return (yield from self._verify(active, bucket, store, flow))
        yield from self._replay(active, bucket)
        return bucket.buffer

    def close(self) -> None:
        """Free all graphs. Before their communicator is closed: NCCL waits for graphs that hold its operations."""
        self._forget()
        self._waiter.close()

    def _forget(self) -> None:
        for _, stages in self._stages.values():
            for stage in stages:
                if stage.graph is not None:
                    stage.graph.reset()
        self._stages, self._active, self._table.used = {}, {}, 0

    def _fill(self, bucket: Bucket) -> None:
        """Write the numbers of this step's graphs to the table."""
        values = [0] * self._table.used
        for stage in self._active.values():
            for start, count, compute in stage.rows:
                values[start : start + count] = compute(bucket.step, bucket.ranks)
        if values:
            self._table.write(values)

    def _run_warm(self, stage: Stage | None, bucket: Bucket, flow: Run) -> Task[Tensor]:
        """Run the flow as it is, and record its decisions."""
        trace, traffic = Trace(), self._scheduler.traffic
        before = traffic.collectives, traffic.bytes_sent
        update = yield from flow(TracedBucket.of(bucket, trace))
        if stage is None:
            stage = Stage(trace.decisions)
            _, stages = self._stages.setdefault(bucket.index, (bucket.layout, []))
            if len(stages) < MOST_STAGES:
                stages.append(stage)
        stage.runs += 1
        stage.collectives, stage.bytes_sent = traffic.collectives - before[0], traffic.bytes_sent - before[1]
        return update

    def _capture(self, stage: Stage, bucket: Bucket, flow: Run) -> Task[None]:
        """Capture the flow.

        Raises:
            Exception: the flow cannot be captured.
        """
        graph, trace, used = self._new_graph(), Trace(table=self._table), self._table.used

        def answer(request: Collective) -> Answer:
            if request.group != "world":
                raise NotCapturable(f"{request} is of a group; graphs of several communicators are not supported")
            # The sum of two terms does not depend on their order
            several = bucket.size > 2 and isinstance(request, AllReduce | ReduceScatter)
            trace.sums |= several and request.tensor.is_floating_point()
            return (yield from graph.answer(request))

        try:
            Layout.sealed = True
            with graph.capture():
                yield from relay(flow(TracedBucket.of(bucket, trace)), answer)
            if [value for _, value in trace.decisions] != [value for _, value in stage.decisions]:
                raise NotCapturable("its flow takes other decisions in the same stage")
        except BaseException:
            self._table.used = used
            graph.reset()
            raise
        finally:
            Layout.sealed = False
        stage.graph, stage.buffer, stage.rows, stage.exact = graph, bucket.buffer, trace.rows, not trace.sums

    def _verify(self, stage: Stage, bucket: Bucket, store: StateStore, flow: Run) -> Task[Tensor]:
        """Run the flow as it is and as a graph, and compare the results (rule 3)."""
        tensors = [bucket.buffer, *store.tensors(bucket.layout)]
        given, traffic = [tensor.clone() for tensor in tensors], self._scheduler.traffic
        before, reason = (traffic.collectives, traffic.bytes_sent), None
        if stage.graph is None:
            try:
                yield from self._capture(stage, bucket, flow)
            except Exception as error:
                self._scheduler.check_failure()
                reason = str(error) if isinstance(error, NotCapturable) else f"{type(error).__name__}: {error}"
            _assign(tensors, given)  # unless operations only run when they are replayed
            self._fill(bucket)
        update = yield from flow(bucket)
        results = [tensor.clone() for tensor in tensors]
        if self._agree(reason):
            _assign(tensors, given)
            yield from self._replay(stage, bucket)
            if not all(_same(a, b, stage.exact) for a, b in zip(results, tensors, strict=True)):
                reason = f"the graph of bucket {bucket.index} gives other results"
            _assign(tensors, results)
            if self._agree(reason):
                stage.verified += 1
        traffic.collectives, traffic.bytes_sent = before[0] + stage.collectives, before[1] + stage.bytes_sent
        return update

    def _replay(self, stage: Stage, bucket: Bucket) -> Task[None]:
        assert stage.graph is not None
        moved = bucket.buffer.data_ptr() != stage.buffer.data_ptr()
        if moved:
            stage.buffer.copy_(bucket.buffer)
        traffic = self._scheduler.traffic
        before = traffic.collectives, traffic.bytes_sent
        yield from stage.graph.replay()
        traffic.collectives, traffic.bytes_sent = before[0] + stage.collectives, before[1] + stage.bytes_sent
        if moved:
            bucket.buffer.copy_(stage.buffer)
        if bucket.last and bucket.buffer.is_cuda:
            self._waiter.watch(ReplayWork(self._communicator.watch))

    def _agree(self, reason: str | None) -> bool:
        """Return whether no rank has a reason to turn graphs off. Collective."""
        reasons = self._control.all_gather_object(reason)
        for rank, text in enumerate(reasons):
            if text is not None and self.off is None:
                self.off = f"rank {rank}: {text}"
                if self._control.rank == 0:
                    log.warning("flows do not run as CUDA graphs, which costs time on the host: %s", self.off)
                self._forget()
        return self.off is None


def open_graphs(
    scheduler: Scheduler, communicator: Communicator, control: Communicator, device: torch.device
) -> FlowGraphs | None:
    """Return graphs for flows that only enqueue, whose collectives are not compared; None for all others."""
    if isinstance(scheduler, StreamScheduler) and not scheduler.checks:
        new_graph = partial(CudaGraph, torch.cuda.graph_pool_handle())
        return FlowGraphs(scheduler, communicator, control, device, new_graph)
    return None


def _assign(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _same(a: Tensor, b: Tensor, exact: bool) -> bool:
    """Return whether two results have equal bits; if not ``exact``, whether half of their digits are equal.

    The order of a sum changes the last digits, and orthonormal bases and differences of sums have fewer exact ones.
    """
    if exact or not a.is_floating_point() or not a.numel():
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    tolerance, largest = torch.finfo(a.dtype).eps ** 0.5, a.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(largest), equal_nan=True)
