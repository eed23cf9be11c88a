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
4. Gradients and state keep their addresses (:attr:`StateStore.in_place`). With other buckets all stages begin anew.
   Where only the gradients' address differs, they are copied, because other ranks may not know of it.
5. What differs between the steps of a stage reaches the graph through one :class:`~.trace.Table` on the device, which
   the host fills before a step's first flow (:meth:`Bucket.number`, :meth:`Bucket.integers`). A captured flow that
   reads the step number or the weights in another way raises :class:`NotCapturable`.
6. All graphs of a synchronizer share one memory pool and one stream. No tensor of the pool is read after a replay.
7. NCCL's watchdog does not see replays. Once per step a thread waits for them, under the monitor's time limit.
8. Steps in which a rank has weight 0 run as they are.
9. A policy that declares no ``rounds`` may share data between its flows, which a graph would not see. It has no graphs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Answer, Communicator, Watch, Work
from hvdbridge.errors import StepError, Unsupported
from hvdbridge.execution.flow import Task, Waiter
from hvdbridge.execution.scheduler import Scheduler, StreamScheduler
from hvdbridge.execution.state_store import StateStore
from hvdbridge.execution.trace import CaptureMode, Choice, Compute, Table, Trace, TracedBucket
from hvdbridge.policy.bucket import Bucket, Layout, Weights
from hvdbridge.policy.capture import NotCapturable, capturing
from hvdbridge.policy.collectives import AllReduce, Collective, ReduceScatter, relay

log = logging.getLogger("hvdbridge")

WARM_RUNS = 2
"""Number of flows of a stage that run before one is captured: the first compiles and connects, the second shows that
the first has left nothing to do."""

VERIFIED_RUNS = 2
"""Number of replays of a stage that are compared with the flow: the second has other seeds, weights and gradients."""

MOST_STAGES = 16
"""Largest number of stages per bucket. Later ones run as they are."""

NO_USERS_GRAPH = "torch.cuda.graph cannot capture a step with this policy"

Run = Callable[[Bucket], Task[Tensor]]
"""Runs a bucket's flow and merges its state; the update that it returns lies in the bucket's buffer."""


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


_invalid: list[Any] = []
"""Graphs whose capture CUDA has refused. The pinned-memory allocator keeps their addresses, so they are never freed."""


class CudaGraph:
    """A CUDA graph.

    Args:
        pool: the handle of the memory that it shares with other graphs.
        stream: the stream on which they are captured. No other operations use it, so cuBLAS's workspace of this stream
            is in the pool, and is neither freed nor used while a graph runs.
    """

    def __init__(self, pool: Any, stream: Any) -> None:
        self._graph, self._pool, self._stream = torch.cuda.CUDAGraph(), pool, stream

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads may call CUDA meanwhile (a loader that pins memory), so only this thread is restricted
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with CaptureMode():
                    yield
            except BaseException:
                with suppress(RuntimeError):  # the first error says why
                    self._end()
                raise
            self._end()

    def answer(self, request: Collective) -> Answer:
        return (yield request)  # type: ignore[misc,return-value]

    def replay(self) -> Task[None]:
        self._graph.replay()
        return
        yield

    def reset(self) -> None:
        self._graph.reset()

    def _end(self) -> None:
        """End the capture. If it is invalid, undo what ``capture_end`` leaves behind when it raises.

        The allocator would never free tensors that several streams use, nor the pool, and in older releases of torch
        the default generator would refuse to draw numbers.
        """
        try:
            self._graph.capture_end()
        except RuntimeError:
            _invalid.append(self._graph)
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
            generator = torch.cuda.default_generators[device]
            offset = generator.get_offset()
            try:
                torch.rand(1, generator=generator, device=generator.device)
            except RuntimeError:
                generator.graphsafe_set_state(generator.clone_state())
            generator.set_offset(offset)
            raise


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
        self._event, self._watch = torch.cuda.Event(blocking=True), watch  # blocking: the thread does not spin
        self._event.record()

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
        new_pool: returns a constructor of graphs that share their memory.
    """

    def __init__(
        self, scheduler: Scheduler, communicator: Communicator, control: Communicator, device: torch.device,
        new_pool: Callable[[], Callable[[], Graph]],
    ) -> None:  # fmt: skip
        self.off: str | None = None  # the reason why flows run as they are
        self._scheduler, self._communicator, self._control = scheduler, communicator, control
        self._table, self._new_pool, self._new_graph = Table(device), new_pool, new_pool()
        self._stages: dict[int, tuple[Layout, list[Stage]]] = {}  # by index of the bucket
        self._active: dict[int, Stage] = {}  # of the current step
        self._replays = 0  # in the current step
        self._waiter = Waiter(lambda: None)

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return sum(stage.graph is not None for _, stages in self._stages.values() for stage in stages)

    def run(self, bucket: Bucket, store: StateStore, flow: Run) -> Task[Tensor]:
        """Run the flow of a bucket, as it is or as a graph; return its update, in the bucket's buffer."""
        if self.off is not None:
            return (yield from flow(bucket))
        update = yield from self._run(bucket, store, flow)
        if bucket.last and self._replays and bucket.buffer.is_cuda:
            self._waiter.watch(ReplayWork(self._communicator.watch))
        return update

    def _run(self, bucket: Bucket, store: StateStore, flow: Run) -> Task[Tensor]:
        known = self._stages.get(bucket.index)
        if known is not None and known[0] is not bucket.layout:
            self._forget()
            store.undivide()
        if bucket.index == 0:
            self._begin_step(bucket)
        if bucket.weights is not None and 0.0 in bucket.weights:  # ranks of weight 0 decide otherwise than the rest
            return (yield from flow(bucket))
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
        if self.captured:
            self._synchronize("the last step's CUDA graphs")
            for _, stages in self._stages.values():
                for stage in stages:
                    if stage.graph is not None:
                        stage.graph.reset()
            self._new_graph = self._new_pool()  # the memory of the old one was freed with its last graph
        self._stages, self._active, self._table.used = {}, {}, 0

    def _begin_step(self, bucket: Bucket) -> None:
        """Choose each bucket's stage, and write the numbers of their graphs to the table."""
        self._active, self._replays = {}, 0
        for index, (_, stages) in self._stages.items():
            matching = (stage for stage in stages if stage.matches(bucket.step, bucket.weights))
            if (stage := next(matching, None)) is not None:
                self._active[index] = stage
        self._fill(bucket)

    def _fill(self, bucket: Bucket) -> None:
        values = [0] * self._table.used
        for stage in self._active.values():
            for start, count, compute in stage.rows:
                numbers = compute(bucket.step, bucket.ranks)
                if len(numbers) != count:
                    raise StepError(
                        f"Bucket.integers: {compute} gives {len(numbers)} integers in step {bucket.step}, and {count} "
                        "in an earlier step with the same decisions. Let Bucket.decide return their number."
                    )
                values[start : start + count] = numbers
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
        graph, trace, used = self._new_graph(), Trace(captured=True, table=self._table), self._table.used

        def answer(request: Collective) -> Answer:
            if request.group != "world":
                raise NotCapturable(f"{request} is of a group; graphs of several communicators are not supported")
            # The sum of two terms does not depend on their order
            several = bucket.size > 2 and isinstance(request, AllReduce | ReduceScatter)
            trace.sums |= several and request.tensor.is_floating_point()
            return (yield from graph.answer(request))

        try:
            with capturing(), graph.capture():
                yield from relay(flow(TracedBucket.of(bucket, trace)), answer)
            if trace.values != [value for _, value in stage.decisions]:
                raise NotCapturable("its flow takes other decisions in the same stage")
        except BaseException:
            self._table.used = used
            raise
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
        if self._agree(stage, bucket, reason):
            _assign(tensors, given)
            yield from self._replay(stage, bucket)
            self._synchronize("the comparison of CUDA graphs")
            if not all(_same(a, b, stage.exact) for a, b in zip(results, tensors, strict=True)):
                reason = f"the graph of bucket {bucket.index} gives other results"
            _assign(tensors, results)
            if self._agree(stage, bucket, reason):
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
        self._replays += 1

    def _synchronize(self, what: str) -> None:
        """Wait for the flows so far under the monitor's limit."""
        if isinstance(self._scheduler, StreamScheduler):
            with self._communicator.watch(what):
                self._scheduler.stream.synchronize()

    def _agree(self, stage: Stage, bucket: Bucket, reason: str | None) -> bool:
        """Return whether no rank has a reason to turn graphs off. Collective.

        Raises:
            StepError: ranks take different decisions, so that they would wait for different collectives.
        """
        own = bucket.index, str([value for _, value in stage.decisions])
        rows = self._control.all_gather_object((own, reason))
        if any(other != own for other, _ in rows):
            raise StepError(
                f"the ranks' flows take different decisions: {'; '.join(str(other) for other, _ in rows)} (bucket, "
                "values of Bucket.decide by rank). A decision depends on its arguments alone, step and weights."
            )
        for rank, (_, text) in enumerate(rows):
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
        # NCCL would register the buffers of captured collectives, and keep them registered when graphs are freed
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        return FlowGraphs(scheduler, communicator, control, device, cuda_pool)
    return None


def cuda_pool() -> Callable[[], Graph]:
    """Return a constructor of CUDA graphs that share their memory."""
    return partial(CudaGraph, torch.cuda.graph_pool_handle(), torch.cuda.Stream())


def run_in_users_graph(bucket: Bucket, flow: Run) -> Task[Tensor]:
    """Run a flow while the user captures a whole step (``torch.cuda.graph``), which is replayed without this library.

    Raises:
        Unsupported: the flow depends on the step number or on weights, or needs the host. Nothing has been sent.
    """
    trace = Trace(captured=True)
    traced = TracedBucket.of(bucket, trace)
    traced.origin = replace(bucket, step=trace.step)  # decisions must hold for all later steps
    try:
        with capturing(), CaptureMode():
            return (yield from flow(traced))
    except NotCapturable as error:
        raise Unsupported(f"{NO_USERS_GRAPH}: {error}") from error


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
