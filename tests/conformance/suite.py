"""The specification of a communicator: every method ``test_*`` below holds on every backend at every size.

Each rank runs the whole suite (``rank.py`` starts it). A test records failed checks and continues, so that the ranks
stay in step. No test names a backend: ``natives.py`` has the calls of the libraries.
"""

from __future__ import annotations

import hashlib
import math
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from conformance.inputs import BITS, bits, cases, difference, input_of, ops, reduction_error, values
from torch import Tensor

from hvdbridge.backends.communicator import DTYPES, Answer, Communicator
from hvdbridge.errors import ConfigurationError, NotInitialized, Unsupported
from hvdbridge.execution.flow import Submission, Task
from hvdbridge.execution.scheduler import ThreadScheduler
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter


class CommunicatorSuite:
    """The checks of one rank. ``make`` returns a communicator of all ranks, of the library that ``native`` started."""

    def __init__(self, make: Callable[[], Communicator], native: Any) -> None:
        self.make = make
        self.native = native
        self.users_ranks = list(range((native.size() + 1) // 2))
        self.users_group = native.group(self.users_ranks)
        self.comm = make()
        self.control = self.comm.control()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.wrong: list[str] = []
        self.digests: list[str] = []

    def run(self) -> dict[str, list[str]]:
        """Run all tests and return the failed checks of each on this rank."""
        found = {}
        for name in suite_names():
            self.wrong, self.digests = [], []
            try:
                getattr(self, name)()
                self.compare_digests()
            except Exception:
                self.wrong.append(traceback.format_exc())
            found[name] = self.wrong[:20]
        self.control.close()
        self.comm.close()
        return found

    def expect(self, wrong: str, what: str) -> None:
        """Record that the check ``what`` failed with ``wrong``, unless that is empty."""
        if wrong:
            self.wrong.append(f"{what}: {wrong}")

    def same_everywhere(self, tensor: Tensor, what: str) -> None:
        """Record ``tensor``, whose bits must be equal on all ranks."""
        self.digests.append(f"{what}: {hashlib.sha256(bits(tensor)).hexdigest()[:12]}")

    def compare_digests(self) -> None:
        for other, digests in enumerate(self.control.all_gather_object(self.digests)):
            for own, digest in zip(self.digests, digests, strict=True):
                self.expect(f"rank {other} has {digest}" if own != digest else "", f"bits differ, {own}")

    @contextmanager
    def refuses(self, error: type[Exception], *words: str) -> Iterator[None]:
        try:
            yield
        except error as e:
            missing = [word for word in words if word not in str(e)]
            self.expect(f"{e} does not say {missing}" if missing else "", error.__name__)
        else:
            self.expect("nothing was raised", error.__name__)

    # -- each collective, each dtype, each shape and layout ----------------------------------------------

    def test_all_reduce(self) -> None:
        for dtype, shape, layout in cases(self.size):
            for op in ops(dtype, layout):
                inputs = [input_of(r, dtype, shape, layout) for r in range(self.size)]
                answer = self.comm.execute(AllReduce(input_of(self.rank, dtype, shape, layout), op))
                what = f"AllReduce {op} {dtype} {shape} {layout}"
                self.expect(reduction_error(answer, inputs, op), what)
                self.same_everywhere(answer, what)

    def test_all_gather(self) -> None:
        for dtype, shape, layout in cases(self.size):
            answer = self.comm.execute(AllGather(input_of(self.rank, dtype, shape, layout)))
            expected = torch.stack([input_of(r, dtype, shape, layout) for r in range(self.size)])
            self.expect(difference(answer, expected, 0.0), f"AllGather {dtype} {shape} {layout}")

    def test_all_to_all(self) -> None:
        for dtype, shape, layout in cases(self.size, self.size):
            answer = self.comm.execute(AllToAll(input_of(self.rank, dtype, shape, layout)))
            expected = torch.stack([input_of(r, dtype, shape, layout)[self.rank] for r in range(self.size)])
            self.expect(difference(answer, expected, 0.0), f"AllToAll {dtype} {shape} {layout}")

    def test_reduce_scatter(self) -> None:
        for dtype, shape, layout in cases(self.size, self.size):
            for op in ops(dtype, layout):
                inputs = [input_of(r, dtype, shape, layout)[self.rank] for r in range(self.size)]
                answer = self.comm.execute(ReduceScatter(input_of(self.rank, dtype, shape, layout), op))
                self.expect(reduction_error(answer, inputs, op), f"ReduceScatter {op} {dtype} {shape} {layout}")

    def test_broadcast(self) -> None:
        root = self.size - 1
        for dtype, shape, layout in cases(self.size):
            answer = self.comm.execute(Broadcast(input_of(self.rank, dtype, shape, layout), root))
            self.expect(difference(answer, input_of(root, dtype, shape, layout), 0.0), f"{dtype} {shape} {layout}")
        for root in range(self.size):
            answer = self.comm.execute(Broadcast(values(self.rank, (1 << 16,), torch.float32), root))
            self.expect(difference(answer, values(root, (1 << 16,), torch.float32), 0.0), f"from {root}")

    def test_dtypes_that_only_move(self) -> None:
        for dtype in (torch.int16, torch.complex64):
            answer = self.comm.execute(AllGather(torch.tensor([self.rank], dtype=dtype)))
            self.expect(difference(answer.real.long().view(-1), torch.arange(self.size), 0.0), f"AllGather {dtype}")

    def test_one_element_of_stride_zero(self) -> None:
        for request, expected in (
            (AllReduce(torch.tensor(2.0).expand(1)), [2.0 * self.size]),
            (AllReduce(torch.tensor(2.0, dtype=torch.bfloat16).expand(1), "max"), [2.0]),
            (AllGather(torch.tensor(2.0).expand(1, 1)), [2.0] * self.size),
            (Broadcast(torch.tensor(2.0).expand(1)), [2.0]),
        ):
            got = self.comm.execute(request).flatten().tolist()
            self.expect("" if got == expected else f"got {got}", request.signature())

    # -- numbers -----------------------------------------------------------------------------------------

    def test_no_copy(self) -> None:
        for n in (1, 5000):
            tensor = torch.ones(n)
            answer = self.comm.execute(AllReduce(tensor))
            self.expect("" if answer.data_ptr() == tensor.data_ptr() else "another tensor answered", "in place")

    def test_integers_wrap(self) -> None:
        for dtype in BITS:
            top = torch.full((5000,), torch.iinfo(dtype).max, dtype=dtype)
            inputs = [top] * self.size
            for request in (AllReduce(top.clone()), ReduceScatter(torch.stack(inputs))):
                self.expect(reduction_error(self.comm.execute(request), inputs, "sum"), request.signature())

    def test_not_finite_travels(self) -> None:
        inf, nan = math.inf, math.nan
        columns = {  # rank 0's value, the last rank's (others: 1), op -> result on all ranks
            "nan first": (nan, 1.0, {"sum": nan, "product": nan, "min": nan, "max": nan}),
            "nan last": (1.0, nan, {"sum": nan, "product": nan, "min": nan, "max": nan}),
            "inf": (inf, 1.0, {"sum": inf, "product": inf, "min": 1.0, "max": inf}),
            "both infs": (inf, -inf, {"sum": nan, "product": -inf, "min": -inf, "max": inf}),
        }
        for dtype in (d for d in DTYPES if d.is_floating_point):
            for name, (first, last, expected) in columns.items():
                for op, result in expected.items():
                    for n in (3, 2051):
                        mine = torch.full(
                            (n,), first if self.rank == 0 else last if self.rank == self.size - 1 else 1.0
                        )
                        answer = self.comm.execute(AllReduce(mine.to(dtype), op))
                        what = f"{name} {op} {dtype} {n}"
                        self.same_everywhere(answer, what)
                        if self.size > 1:
                            self.expect(difference(answer, torch.full((n,), result, dtype=dtype), 0.0), what)

    def test_bits_are_moved_as_they_are(self) -> None:
        patterns = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1, -1, 0x7F800000]).to(torch.int32) + self.rank
        answer = self.comm.execute(AllGather(patterns.view(torch.float32)))
        expected = torch.stack([patterns - self.rank + r for r in range(self.size)])
        self.expect(difference(answer.view(torch.int32), expected, 0.0), "NaN payloads, signed zeros, subnormals")

    def test_nans_of_several_ranks_have_equal_bits(self) -> None:
        for n in (1, 2, 100, 3000, 5000, 300_000):
            for name, signed in (("nan", 0x7FC00000), ("-nan", -0x400000)):
                mine = torch.full((n,), signed + self.rank, dtype=torch.int32).view(torch.float32)
                self.same_everywhere(self.comm.execute(AllReduce(mine)), f"{name} {n}")

    def test_large_messages_go_in_pieces(self) -> None:
        whole, self.comm.max_operation_bytes = self.comm.max_operation_bytes, 1000
        everyone = range(self.size)
        try:
            for dtype in (torch.int8, torch.bfloat16, torch.float32):
                mine = [values(r, (self.size, 2051), dtype) for r in everyone]
                for n in (7, 2051):
                    answer = self.comm.execute(AllReduce(mine[self.rank][0, :n].clone()))
                    self.expect(reduction_error(answer, [m[0, :n] for m in mine], "sum"), f"AllReduce {dtype} {n}")
                answer = self.comm.execute(AllGather(mine[self.rank][0]))
                self.expect(difference(answer, torch.stack([m[0] for m in mine]), 0.0), f"AllGather {dtype}")
                answer = self.comm.execute(AllToAll(mine[self.rank].clone()))
                self.expect(difference(answer, torch.stack([m[self.rank] for m in mine]), 0.0), f"AllToAll {dtype}")
                answer = self.comm.execute(Broadcast(mine[self.rank].clone(), 0))
                self.expect(difference(answer, mine[0], 0.0), f"Broadcast {dtype}")
        finally:
            self.comm.max_operation_bytes = whole

    # -- groups and channels -----------------------------------------------------------------------------

    def test_two_groups_at_once(self) -> None:
        groups = [list(range(0, self.size, 2)), list(range(1, self.size, 2))]
        child = self.comm.split(groups)
        assert child is not None
        mine = groups[self.rank % 2]
        self.expect("" if (child.rank, child.size) == (mine.index(self.rank), len(mine)) else repr(child), "renumbered")
        for step in range(3 if self.rank % 2 else 8):  # the groups are independent, also in their number of calls
            answer = child.execute(AllReduce(values(self.rank, (100 + step,), torch.int64)))
            inputs = [values(r, (100 + step,), torch.int64) for r in mine]
            self.expect(reduction_error(answer, inputs, "sum"), f"group {mine} step {step}")
        for root in range(child.size):
            got = int(child.execute(Broadcast(torch.tensor(self.rank), root)))
            self.expect("" if got == mine[root] else f"got {got}", f"root {root} of {mine}")
        inner = child.control()
        self.expect("" if inner.all_gather_object(self.rank) == mine else "wrong ranks", "control of a group")
        inner.close()
        child.close()

    def test_a_rank_in_no_group(self) -> None:
        if self.size > 1:
            child = self.comm.split([range(self.size - 1)])
            if self.rank == self.size - 1:
                self.expect("" if child is None else repr(child), "the rank left out")
            else:
                assert child is not None
                child.barrier()
                child.close()

    def test_duplicates_do_not_mix(self) -> None:
        first, second = self.comm.split([range(self.size)]), self.comm.split([range(self.size)])
        assert first is not None
        assert second is not None
        answers: dict[int, list[Tensor]] = {1: [], 2: []}

        def use(comm: Communicator, factor: int) -> None:
            for step in range(20):
                answers[factor].append(comm.execute(AllReduce(torch.full((64,), float(factor * step)))))

        other = threading.Thread(target=use, args=(second, 2))
        other.start()
        use(first, 1)
        other.join()
        for factor, got in answers.items():
            for step, answer in enumerate(got):
                expected = torch.full((64,), float(factor * step * self.size))
                self.expect(difference(answer, expected, 0.0), f"duplicate {factor} step {step}")
        first.close()
        second.close()

    def test_the_users_own_collectives_do_not_mix(self) -> None:
        user_tensors = [torch.full((64,), 1000.0 + step) for step in range(20)]

        def user() -> None:
            for tensor in user_tensors:
                self.native.all_reduce(tensor)

        thread = threading.Thread(target=user)
        thread.start()
        answers = [self.comm.execute(AllReduce(torch.full((64,), float(step)))) for step in range(20)]
        thread.join()
        for step in range(20):
            self.expect(difference(answers[step], torch.full((64,), float(step * self.size)), 0.0), f"ours {step}")
            expected = torch.full((64,), (1000.0 + step) * self.size)
            self.expect(difference(user_tensors[step], expected, 0.0), f"the user's {step}")

    def test_node_and_cross(self) -> None:
        nodes = {1: [7], 2: [5, 5], 3: [0, 0, 1], 4: [0, 0, 1, 1]}[self.size]
        comm = self.comm.split([range(self.size)])
        assert comm is not None
        comm.set_nodes(nodes)
        node = [r for r in range(self.size) if nodes[r] == nodes[self.rank]]
        index = node.index(self.rank)
        cross = [r for r in range(self.size) if nodes[:r].count(nodes[r]) == index]
        for name, members in (("node", node), ("cross", cross)):
            for _ in range(2):
                got = comm.execute(AllGather(torch.tensor(self.rank), group=name)).tolist()
                self.expect("" if got == members else f"got {got}", f"{name} {members}")
        if self.size > 2:  # groups of a group have the nodes, too
            child = comm.split([range(1, self.size), [0]])
            assert child is not None
            got = child.execute(AllGather(torch.tensor(self.rank), group="node")).tolist()
            members = node if self.rank == 0 else [r for r in node if r > 0]
            self.expect("" if got == (members if self.rank else [0]) else f"got {got}", "node of a group")
            child.close()
        comm.close()

    def test_ranks_of(self) -> None:
        everyone = list(range(self.size))
        self.expect("" if self.comm.ranks_of(reversed(everyone)) == everyone else "wrong", "an iterable")
        if self.rank in self.users_ranks:
            got = self.comm.ranks_of(self.users_group)
            self.expect("" if got == self.users_ranks else f"got {got}", f"the library's group of {self.users_ranks}")
        for nonsense in ([self.size], [-1], [0, 0], [], "all", 3):
            with self.refuses(ConfigurationError, "group="):
                self.comm.ranks_of(nonsense)

    # -- objects, control, life --------------------------------------------------------------------------

    def test_objects(self) -> None:
        got = self.control.all_gather_object({"rank": self.rank, "pad": "x" * 1000 * self.rank})
        self.expect("" if [o["rank"] for o in got] == list(range(self.size)) else repr(got), "all_gather_object")
        for root in range(self.size):
            value = self.control.broadcast_object(("from", self.rank) if self.rank == root else None, root)
            self.expect("" if value == ("from", root) else repr(value), "broadcast_object")

    def test_barrier(self) -> None:
        for _ in range(3):
            self.comm.barrier()

    def test_many_names_and_repeats(self) -> None:
        for step in range(30):
            for n in (1, 2, 3):
                answer = self.comm.execute(AllReduce(torch.full((n,), float(step))))
                self.expect(difference(answer, torch.full((n,), float(step * self.size)), 0.0), f"{n} step {step}")

    def test_wrong_use(self) -> None:
        wrong: list[tuple[Callable[[], Collective], tuple[str, ...]]] = [
            (lambda: AllReduce(torch.ones(2, dtype=torch.bool)), ("bool", "max")),
            (lambda: AllReduce(torch.ones(2), "mean"), ("mean", "sum")),
            (lambda: AllReduce(torch.ones(2, dtype=torch.complex64)), ("complex64", "float32")),
            (lambda: AllReduce(torch.ones(2).to_sparse()), ("to_dense",)),
            (lambda: AllGather(torch.ones(2, device="meta")), ("meta", f"rank {self.rank}")),
            (lambda: AllToAll(torch.ones(())), ("row",)),
            (lambda: AllToAll(torch.ones(self.size + 1)), (f"{self.size + 1} rows", f"rank {self.rank}")),
            (lambda: ReduceScatter(torch.ones(self.size + 1)), (f"{self.size + 1} rows",)),
            (lambda: Broadcast(torch.ones(1), self.size), ("root",)),
            (lambda: Broadcast(torch.ones(1), -1), ("root",)),
        ]
        for request, words in wrong:
            with self.refuses(Unsupported, *words):
                self.comm.execute(request())
        with self.refuses(ConfigurationError, "nobody", "world"):
            self.comm.execute(AllReduce(torch.ones(1), group="nobody"))
        with self.refuses(ConfigurationError, "disjoint"):
            self.comm.split([[0], [0]])
        with self.refuses(ConfigurationError, "ranks"):
            self.comm.split([[self.size]])
        with self.refuses(ConfigurationError, "node"):
            self.comm.set_nodes([0] * (self.size + 1))

    def test_flows_go_on_when_their_answer_is_there(self) -> None:
        """A flow does not wait for its next turn, which comes only with the flush here."""
        requests: list[Callable[[], Collective]] = [
            lambda: AllReduce(torch.ones(2000)),
            lambda: AllGather(torch.ones(2000)),
            lambda: AllToAll(torch.ones(self.size, 2000)),
            lambda: ReduceScatter(torch.ones(self.size, 2000)),
            lambda: Broadcast(torch.ones(2000)),
        ]
        for request in requests:
            answered = threading.Event()

            def flow(request: Collective, answered: threading.Event) -> Task[Tensor]:
                yield request
                answered.set()
                return (yield AllReduce(torch.ones(3)))

            scheduler = ThreadScheduler()
            pending = scheduler.submit(Submission(flow(request(), answered), self.comm, rounds=2))
            self.expect("" if answered.wait(20) else "it was not found", request().signature())
            scheduler.flush()
            self.expect(difference(pending.wait(), torch.full((3,), float(self.size)), 0.0), "the next one")
            scheduler.close()

    def test_the_last_operation_of_a_request_says_so(self) -> None:
        whole = self.comm.max_operation_bytes
        try:
            for self.comm.max_operation_bytes in (whole, 1000):
                for request in (
                    AllReduce(torch.ones(2000)), AllReduce(torch.ones(5000, dtype=torch.bfloat16), "max"),
                    AllGather(torch.ones(2000)), AllToAll(torch.ones(self.size, 2000)),
                    ReduceScatter(torch.ones(self.size, 2000)), Broadcast(torch.ones(2000)),
                ):  # fmt: skip
                    works = [work.last for work in self.comm.answer(request) if work is not None]
                    expected = [False] * (len(works) - 1) + [True] if self.size > 1 else []
                    self.expect("" if works == expected else f"{works}", request.signature())
        finally:
            self.comm.max_operation_bytes = whole

    def test_a_wait_can_have_a_limit(self) -> None:
        """The last rank starts the collective after the waits of all others have timed out."""
        if self.size == 1:
            return
        steps, late = self.comm.answer(AllReduce(torch.full((5000,), 2.0))), self.rank == self.size - 1
        if late:
            self.control.barrier()
        work = next(step for step in steps if step is not None)
        if not late:
            self.expect("over before all began" if work.wait_at_most(0.02) else "", "in vain")
            self.control.barrier()
        self.expect("" if work.wait_at_most(30) else "not over", "at last")
        answer = finish(steps)
        self.expect(difference(answer, torch.full((5000,), 2.0 * self.size), 0.0), "the answer")

    def test_watch_sees_each_request(self) -> None:
        seen: list[str] = []

        @contextmanager
        def watch(what: object) -> Iterator[None]:
            seen.append(str(what))
            yield
            seen.append("done")

        before, self.comm.watch = self.comm.watch, watch
        self.comm.barrier()
        self.comm.watch = before
        self.expect("" if len(seen) == 2 and "AllReduce[1] int32" in seen[0] else repr(seen), "watch")

    def test_closing(self) -> None:
        for _ in range(2):  # a new world works after the first one is closed
            comm = self.make()
            comm.barrier()
            comm.close()
            comm.close()
            with self.refuses(NotInitialized, "closed"):
                comm.execute(AllReduce(torch.ones(1)))


def finish(steps: Answer) -> Tensor:
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def suite_names() -> list[str]:
    return [name for name in vars(CommunicatorSuite) if name.startswith("test_")]
