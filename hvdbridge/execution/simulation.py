"""N ranks in one process: the reference for every backend, and the test bench of a policy.

Rules:

1. All flows advance in lock-step; what they ask for must agree among the ranks of a group, as
   HVDBRIDGE_DEBUG=1 demands of a real job.
2. Reductions run left to right in rank order, in the tensor's own type.
3. Everything else is the code that real jobs run: buckets, weights, policies, state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from hvdbridge.errors import CollectiveMismatch, ConfigurationError, Unsupported
from hvdbridge.execution.state_store import StateStore
from hvdbridge.policies import from_spec
from hvdbridge.policy.base import Aggregated, Early, Flow, Policy, check_weights, finish, flush, switches, too_early
from hvdbridge.policy.bucket import Bucket, Layout, Ranks, Views, cut_layouts, number_blocks, refuse_complex
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter, output_of

Gradients = Mapping[str, "Tensor | None"]
REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip


class Simulation:
    """Aggregates the gradients of ``size`` simulated ranks, step after step.

    Args:
        policy: a policy, or its spec string.
        params: name -> parameter or shape. The type of a parameter given by its shape is that of its first gradient.
        size: number of ranks.
        local_size: ranks per node, in order (the last node may have fewer); None = one node.
        seed: of the shared randomness.
        buckets: names, bucket by bucket; None = one bucket. Parameters of different types never share one.
        bucket_mb: instead of ``buckets``: cut as on Horovod and MPI, into buckets of that many MiB.

    Raises:
        ConfigurationError: the policy is none for so many ranks, or ``buckets`` do not name each parameter once.

    Attributes:
        stores: each rank's state.
        bytes_sent: bytes that each rank has sent so far, by :meth:`Collective.bytes_sent`.
        bytes_by_group: the same by group, one ``{"world": ..., "node": ..., "cross": ...}`` per rank; what
            passes between nodes in ``cross`` is counted for certain, in ``world`` it depends on the library below.
        skipped: whether the last step's weights added up to zero.

    >>> simulation = Simulation("mean", {"w": (2,)}, size=2)
    >>> simulation.step([{"w": torch.tensor([1., 2.])}, {"w": torch.tensor([3., 4.])}], weights=[3, 1])[0]
    {'w': tensor([1.5000, 2.5000])}
    """

    def __init__(
        self,
        policy: Policy | str,
        params: Mapping[str, Tensor | Sequence[int]],
        size: int,
        local_size: int | None = None,
        seed: int = 0,
        buckets: Sequence[Sequence[str]] | None = None,
        bucket_mb: float | None = None,
    ) -> None:
        if size < 1 or (local_size is not None and local_size < 1):
            raise ConfigurationError(f"a simulation needs at least one rank, got size={size}, local_size={local_size}")
        self.policy = from_spec(policy)
        self.size = size
        self.seed = seed
        self.steps = 0
        self.skipped = False
        self.bytes_sent = [0] * size
        self._given = dict(params)
        self._weights: tuple[float, ...] | None = None
        self._bucket_mb = bucket_mb
        if buckets is not None and bucket_mb is not None:
            raise ConfigurationError("a simulation takes buckets or bucket_mb, not both")
        self._buckets = [list(params)] if buckets is None else [list(names) for names in buckets]
        if sorted(name for names in self._buckets for name in names) != sorted(params):
            raise ConfigurationError("buckets must name every parameter once")
        local = size if local_size is None else local_size
        nodes = [list(range(start, min(start + local, size))) for start in range(0, size, local)]
        cross = [[node[i] for node in nodes if i < len(node)] for i in range(min(local, size))]
        self._groups = {"world": [list(range(size))], "node": nodes, "cross": cross}
        self._nodes = tuple(rank // local for rank in range(size))
        self.policy.check_size(size, len(nodes))
        self.bytes_by_group = [dict.fromkeys(self._groups, 0) for _ in range(size)]
        self._build([])

    def step(
        self, grads_per_rank: Sequence[Gradients], weights: Sequence[float] | None = None
    ) -> list[dict[str, Tensor]]:
        """Aggregate one gradient per rank and name; a missing one counts as zeros.

        Returns:
            The updates of rank 0, of rank 1, ...: name -> tensor of the parameter's shape and type.

        Raises:
            WeightError: weights that :func:`check_weights` refuses. (A sum of zero skips the step.)
            CollectiveMismatch: the ranks' flows asked for different things.
            ConfigurationError: a gradient of an unknown name, another shape or another type than its parameter.
        """
        if len(grads_per_rank) != self.size:
            raise ConfigurationError(f"{self.size} ranks need as many dicts of gradients, got {len(grads_per_rank)}")
        if self.steps == 0:
            found = {name: _parameter(name, given, grads_per_rank) for name, given in self._given.items()}
            if any(p.dtype != self._params[name].dtype for name, p in found.items()):
                self._build(grads_per_rank)
        self._check(grads_per_rank)
        checked = None if weights is None else check_weights(self.policy, weights, self.size)
        self._weights = checked
        self.skipped = checked is not None and sum(checked) == 0
        if self.skipped:
            updates = [{name: torch.zeros_like(p) for name, p in self._params.items()} for _ in range(self.size)]
        else:
            updates = [{} for _ in range(self.size)]
            for index, layout in enumerate(self._layouts):
                for mine, views in zip(updates, self._aggregate(layout, index, grads_per_rank), strict=True):
                    mine.update({name: views[name].to(self._params[name].dtype, copy=True) for name in layout.names})
        self.steps += 1
        return [{name: mine[name] for name in self._params} for mine in updates]

    def after_step(self, parameters_per_rank: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """What the policy makes of the ranks' parameters after their optimizers used the last step's updates.

        Call it after each :meth:`step` and the optimizers; where nothing is due it returns copies.

        Returns:
            The new parameters of rank 0, of rank 1, ...

        Raises:
            ConfigurationError: not the parameters, or their shapes or types, that the simulation was made for.
        """
        if len(parameters_per_rank) != self.size or any(p.keys() != self._params.keys() for p in parameters_per_rank):
            raise ConfigurationError(f"after_step needs all parameters of each of {self.size} ranks")
        self._check(parameters_per_rank, "value")
        given = [{name: p.detach().clone() for name, p in mine.items()} for mine in parameters_per_rank]
        step = self.steps - 1
        if self.steps == 0 or not (switches(self.policy, step) if self.skipped else self.policy.due(step)):
            return given
        if self.skipped:
            self._weights = None
        layout = Layout({name: p.shape for name, p in self._params.items()}, *self._model)
        flats = []
        for mine in given:
            flat = torch.cat([mine[name].reshape(-1) for name in layout.names])
            flats.append(flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True))
        flows: list[Flow] = []
        for rank, flat in enumerate(flats):
            bucket = self._bucket(flat, layout, 0, step, rank)
            flows.append(finish(self.policy.after_step(bucket, self.stores[rank].part(layout))))
        new = []
        for rank, (_, result) in enumerate(self._lockstep(flows)):
            self.stores[rank].merge(layout, result.state, result.update)
            views = Views(layout, result.update)
            new.append({name: views[name].to(p.dtype, copy=True) for name, p in self._params.items()})
        return new

    def flush(self) -> list[dict[str, Tensor]] | None:
        """What the policy held back, for one more optimizer step of each rank; None where there is nothing.

        Parameters of which nothing was held are left out: their gradient is None in that step.
        """
        held = [flush(self.policy, store.whole()) for store in self.stores]
        if not any(updates for updates, _ in held):
            return None
        for store, (_, state) in zip(self.stores, held, strict=True):
            store.load(state)
        return [{name: tensor.clone() for name, tensor in updates.items()} for updates, _ in held]

    def _build(self, grads_per_rank: Sequence[Gradients]) -> None:
        """Parameters, layouts and fresh state; types of those given by shape are read off the gradients."""
        self._params = {name: _parameter(name, given, grads_per_rank) for name, given in self._given.items()}
        refuse_complex(self._params)
        shapes = {name: p.shape for name, p in self._params.items()}
        self._model = number_blocks(shapes), {name: p.dtype for name, p in self._params.items()}
        self._layouts: list[Layout] = []
        if self._bucket_mb is not None:
            self._buckets = [list(cut.names) for cut in cut_layouts(self._params, self._bucket_mb * 2**20)]
        whole = self.policy.scope == "step"
        for names in [list(shapes)] if whole else self._buckets:
            parts: dict[object, list[str]] = {}
            for name in names:
                parts.setdefault(None if whole else self._params[name].dtype, []).append(name)
            self._layouts += [Layout({n: shapes[n] for n in same}, *self._model) for same in parts.values()]
        self.stores = [StateStore(self.policy, self._params) for _ in range(self.size)]

    def _check(self, grads_per_rank: Sequence[Gradients], what: str = "gradient") -> None:
        for rank, grads in enumerate(grads_per_rank):
            for name, grad in grads.items():
                if grad is None:
                    continue
                p = self._params.get(name)
                if p is None:
                    raise ConfigurationError(f"rank {rank} has a {what} of {name!r}, which is no parameter")
                if (grad.shape, grad.dtype) != (p.shape, p.dtype):
                    raise ConfigurationError(
                        f"rank {rank}: the {what} of {name!r} is {grad.dtype}{list(grad.shape)}, "
                        f"its parameter {p.dtype}{list(p.shape)}"
                    )

    def _bucket(self, flat: Tensor, layout: Layout, index: int, step: int, rank: int) -> Bucket:
        groups = {group: _place(rank, lists) for group, lists in self._groups.items() if group != "world"}
        ranks = Ranks(rank, self.size, self._weights, groups, self._nodes)
        return Bucket(flat, layout, index, step, self.seed, ranks, pool=self.stores[rank].pool)

    def _aggregate(self, layout: Layout, index: int, grads_per_rank: Sequence[Gradients]) -> Iterator[Views]:
        """Run one bucket on all ranks; yields each rank's update."""
        flows = []
        for rank, grads in enumerate(grads_per_rank):
            found = [(self._params[name], grads.get(name)) for name in layout.names]
            flat = torch.cat([(torch.zeros_like(p) if g is None else g.detach()).reshape(-1) for p, g in found])
            bucket = self._bucket(flat, layout, index, self.steps, rank)
            flows.append(self.policy.aggregate(bucket, self.stores[rank].part(layout)))
        for rank, (early, result) in enumerate(self._lockstep(flows)):
            self.stores[rank].merge(layout, result.state, result.update)
            yield Views(layout, result.update if early is None else early)

    def _lockstep(self, flows: Sequence[Flow]) -> list[tuple[Tensor | None, Aggregated]]:
        """Advance all flows together until all return; what each said early, and what it returned."""
        answers: list[Tensor | None] = [None] * self.size
        early: list[Tensor | None] = [None] * self.size
        while True:
            requests: list[Collective | None] = []
            results: list[Aggregated] = []
            for rank, (flow, answer) in enumerate(zip(flows, answers, strict=True)):
                try:
                    request = next(flow) if answer is None else flow.send(answer)
                    while isinstance(request, Early):
                        if early[rank] is not None:
                            raise too_early(flow)
                        early[rank] = request.update.clone()
                        request = next(flow)
                    requests.append(request)
                except StopIteration as end:
                    requests.append(None)
                    results.append(end.value)
            if len(results) == self.size:
                return list(zip(early, results, strict=True))
            try:
                answers = list(self._execute(requests))
            except Exception as error:
                # Thrown into a flow that asks, so that the traceback shows the policy's line.
                asking = next(flow for flow, request in zip(flows, requests, strict=True) if request is not None)
                asking.throw(error)
                raise

    def _execute(self, requests: Sequence[Collective | None]) -> Sequence[Tensor]:
        asked = [request for request in requests if request is not None]
        names = {request.group for request in asked}
        group = asked[0].group
        if group not in self._groups:
            raise Unsupported(f"no group named {group!r}; known: {', '.join(self._groups)}")
        answers: dict[int, Tensor] = {}
        whole = len(asked) < self.size or len(names) > 1
        for ranks in self._groups["world" if whole else group]:
            _compare({rank: requests[rank] for rank in ranks})
            members = [request for rank in ranks if (request := requests[rank]) is not None]
            for rank, answer in zip(ranks, execute(members), strict=True):
                answers[rank] = answer
                sent = members[0].bytes_sent(len(ranks))
                self.bytes_sent[rank] += sent
                self.bytes_by_group[rank][group] += sent
        return [answers[rank] for rank in range(self.size)]


def simulate(
    policy: Policy | str, grads_per_rank: Sequence[Gradients], weights: Sequence[float] | None = None
) -> list[dict[str, Tensor]]:
    """One step of a fresh :class:`Simulation` with as many ranks as there are dicts of gradients.

    >>> simulate("sum", [{"w": torch.tensor([1., 2.])}, {"w": torch.tensor([3., 4.])}])[1]
    {'w': tensor([4., 6.])}
    """
    params = {name: grad for grads in grads_per_rank for name, grad in grads.items() if grad is not None}
    return Simulation(policy, params, len(grads_per_rank)).step(grads_per_rank, weights)


def execute(requests: Sequence[Collective]) -> list[Tensor]:
    """Answer one collective for all ranks of its group; request i is that of rank i.

    Raises:
        Unsupported: AllToAll or ReduceScatter whose tensor has not one row per rank.
    """
    answers = _answers(requests)
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if isinstance(request, AllGather | AllToAll) and (out := output_of(request, answer.numel())) is not None:
            answers[i] = out.view(answer.shape).copy_(answer)
    return answers


def _answers(requests: Sequence[Collective]) -> list[Tensor]:
    """In memory of their own."""
    tensors, size = [request.tensor for request in requests], len(requests)
    match requests[0]:
        case AllToAll() | ReduceScatter() if tensors[0].shape[0] != size:
            raise Unsupported(f"{requests[0].signature()}: {size} ranks need {size} rows")
        case AllReduce(op=op):
            total = reduce(REDUCE[op], tensors)
            return [total.clone() for _ in range(size)]
        case ReduceScatter(op=op):
            return list(reduce(REDUCE[op], tensors).clone().unbind())
        case AllGather():
            stacked = torch.stack(tensors)
            return [stacked.clone() for _ in range(size)]
        case AllToAll():
            return list(torch.stack(tensors, dim=1).contiguous().unbind())
        case Broadcast(root=root):
            return [tensors[root].clone() for _ in range(size)]
        case other:
            raise Unsupported(f"{other.kind} is no collective that can be executed")


def _compare(requests: Mapping[int, Collective | None]) -> None:
    """All ranks of a group must ask for the same.

    Raises:
        CollectiveMismatch: naming the ranks that differ.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, request in requests.items():
        ranks_of.setdefault("nothing (its flow has ended)" if request is None else request.signature(), []).append(rank)
    if len(ranks_of) > 1:
        lines = "".join(f"\n  ranks {ranks}: {signature}" for signature, ranks in ranks_of.items())
        raise CollectiveMismatch(f"ranks of one group asked for different collectives:{lines}")


def _parameter(name: str, given: Tensor | Sequence[int], grads_per_rank: Sequence[Gradients]) -> Tensor:
    """What a policy's ``init`` may look at."""
    if isinstance(given, Tensor):
        return given.detach()
    grads = (grad for grads in grads_per_rank if (grad := grads.get(name)) is not None)
    example = next(grads, torch.empty(0, device="cpu"))
    return torch.zeros(torch.Size(given), dtype=example.dtype, device=example.device)


def _place(rank: int, lists: Sequence[Sequence[int]]) -> tuple[int, int]:
    return next((ranks.index(rank), len(ranks)) for ranks in lists if rank in ranks)
