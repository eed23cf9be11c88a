"""Simulation of N ranks in one process: the reference for all backends, and a test bench for policies.

Rules:

1. The flows of all ranks advance in lockstep. Ranks of a group must request the same collective, as in a real job with
   HVDBRIDGE_DEBUG=1.
2. Reductions add up the ranks' tensors from rank 0 on, in the tensor's own dtype.
3. Buckets, weights, policies and state use the code of real jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from hvdbridge.errors import CollectiveMismatch, ConfigurationError, Unsupported
from hvdbridge.execution.state_store import StateStore
from hvdbridge.policies import from_spec
from hvdbridge.policy.base import (
    Aggregated,
    Early,
    Flow,
    Policy,
    check_weights,
    finish,
    flush,
    refuse_complex,
    switches,
    too_early,
)  # fmt: skip
from hvdbridge.policy.bucket import Bucket, Layout, Ranks, Views, cut_layouts, number_blocks
from hvdbridge.policy.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
    groups_of,
    output_of,
)

Gradients = Mapping[str, "Tensor | None"]
REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip


class Simulation:
    """Aggregates the gradients of ``size`` simulated ranks, step after step.

    Args:
        policy: a policy, or its spec string.
        params: name -> parameter or shape. A shape's parameter has the dtype of its first gradient.
        size: number of ranks.
        local_size: number of ranks per node, in rank order (the last node may have fewer); None: one node.
        seed: seed of the random numbers that ranks share.
        buckets: parameter names of each bucket; None: one bucket. Different dtypes never share a bucket.
        bucket_mb: size of buckets in MiB, instead of ``buckets``. They are those of Horovod and MPI.

    Raises:
        ConfigurationError: the policy is not defined for so many ranks, or ``buckets`` does not name each parameter
            once.

    Attributes:
        stores: the state store of each rank.
        bytes_sent: bytes that each rank has sent so far, by :meth:`Collective.bytes_sent`.
        bytes_by_group: the same by group: a dict ``{"world": ..., "node": ..., "cross": ...}`` for each rank. All bytes
            of ``cross`` pass between nodes. How many of ``world`` do depends on a backend's algorithm.
        skipped: the weights of the last step added up to zero.

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
        """Aggregate the ranks' gradients of one step. Zeros replace a missing gradient.

        Args:
            grads_per_rank: for each rank its gradients, by name.
            weights: for each rank its weight; None: all equal.

        Returns:
            The updates of each rank: name -> tensor of the parameter's shape and dtype.

        Raises:
            WeightError: the weights are not valid for the policy. (A sum of zero skips the step.)
            CollectiveMismatch: the ranks' flows requested different collectives.
            ConfigurationError: a gradient has an unknown name, or another shape or dtype than its parameter.
        """
        if len(grads_per_rank) != self.size:
            raise ConfigurationError(f"{self.size} ranks need as many dicts of gradients, got {len(grads_per_rank)}")
        if self.steps == 0:
            params = {name: _parameter(name, given, grads_per_rank) for name, given in self._given.items()}
            if any(p.dtype != self._params[name].dtype for name, p in params.items()):
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
                for update, views in zip(updates, self._aggregate(layout, index, grads_per_rank), strict=True):
                    update.update({name: views[name].to(self._params[name].dtype, copy=True) for name in layout.names})
        self.steps += 1
        return [{name: update[name] for name in self._params} for update in updates]

    def after_step(self, parameters_per_rank: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Run the policy's :meth:`Policy.after_step` on the ranks' parameters, after their optimizers' steps.

        To be called after each :meth:`step` and the optimizers. If the policy is not due, it returns copies.

        Args:
            parameters_per_rank: for each rank its parameters, by name.

        Returns:
            The new parameters of each rank: name -> tensor.

        Raises:
            ConfigurationError: names, shapes or dtypes are not those of the simulation's parameters.
        """
        if len(parameters_per_rank) != self.size or any(p.keys() != self._params.keys() for p in parameters_per_rank):
            raise ConfigurationError(f"after_step needs all parameters of each of {self.size} ranks")
        self._check(parameters_per_rank, "value")
        copies = [{name: p.detach().clone() for name, p in params.items()} for params in parameters_per_rank]
        step = self.steps - 1
        if self.steps == 0 or not (switches(self.policy, step) if self.skipped else self.policy.due(step)):
            return copies
        if self.skipped:
            self._weights = None
        layout = Layout({name: p.shape for name, p in self._params.items()}, *self._model)
        flats = []
        for params in copies:
            flat = torch.cat([params[name].reshape(-1) for name in layout.names])
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
        """Return the updates that the policy holds, for one more optimizer step of each rank; None if it holds none.

        Parameters without a held update are missing. Their gradient is None in that step.
        """
        held = [flush(self.policy, store.whole()) for store in self.stores]
        if not any(updates for updates, _ in held):
            return None
        for store, (_, state) in zip(self.stores, held, strict=True):
            store.load(state)
        return [{name: tensor.clone() for name, tensor in updates.items()} for updates, _ in held]

    def _build(self, grads_per_rank: Sequence[Gradients]) -> None:
        """Make parameters, layouts and initial state. Parameters given by shape have their gradients' dtypes."""
        self._params = {name: _parameter(name, given, grads_per_rank) for name, given in self._given.items()}
        refuse_complex(self._params)
        shapes = {name: p.shape for name, p in self._params.items()}
        self._model = number_blocks(shapes), {name: p.dtype for name, p in self._params.items()}
        self._layouts: list[Layout] = []
        if self._bucket_mb is not None:
            self._buckets = [list(cut.names) for cut in cut_layouts(self._params, self._bucket_mb * 2**20)]
        one_bucket = self.policy.scope == "step"
        for names in [list(shapes)] if one_bucket else self._buckets:
            by_dtype: dict[object, list[str]] = {}
            for name in names:
                by_dtype.setdefault(None if one_bucket else self._params[name].dtype, []).append(name)
            self._layouts += [Layout({n: shapes[n] for n in same}, *self._model) for same in by_dtype.values()]
        self.stores = [StateStore(self.policy, self._params) for _ in range(self.size)]

    def _check(self, grads_per_rank: Sequence[Gradients], what: str = "gradient") -> None:
        """Raise ConfigurationError unless names, shapes and dtypes are those of the parameters."""
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
        """Return the bucket ``index`` of ``rank``, with the gradients or parameters ``flat``."""
        groups = {group: _rank_and_size(rank, lists) for group, lists in self._groups.items() if group != "world"}
        ranks = Ranks(rank, self.size, self._weights, groups, self._nodes)
        return Bucket(flat, layout, index, step, self.seed, ranks, pool=self.stores[rank].pool)

    def _aggregate(self, layout: Layout, index: int, grads_per_rank: Sequence[Gradients]) -> Iterator[Views]:
        """Run one bucket on all ranks, and yield each rank's update."""
        flows = []
        for rank, grads in enumerate(grads_per_rank):
            pairs = [(self._params[name], grads.get(name)) for name in layout.names]
            flat = torch.cat([(torch.zeros_like(p) if g is None else g.detach()).reshape(-1) for p, g in pairs])
            bucket = self._bucket(flat, layout, index, self.steps, rank)
            flows.append(self.policy.aggregate(bucket, self.stores[rank].part(layout)))
        for rank, (early, result) in enumerate(self._lockstep(flows)):
            self.stores[rank].merge(layout, result.state, result.update)
            yield Views(layout, result.update if early is None else early)

    def _lockstep(self, flows: Sequence[Flow]) -> list[tuple[Tensor | None, Aggregated]]:
        """Advance all flows together to their ends. Return each one's Early update, or None, and its result."""
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
                # A flow that waits raises the error, so that the traceback shows the policy's line.
                waiting = next(flow for flow, request in zip(flows, requests, strict=True) if request is not None)
                waiting.throw(error)
                raise

    def _execute(self, requests: Sequence[Collective | None]) -> Sequence[Tensor]:
        """Answer one request of each rank; None for a rank whose flow has ended, which is a mismatch."""
        present = [request for request in requests if request is not None]
        names = {request.group for request in present}
        group = present[0].group
        if group not in self._groups and groups_of(group):
            self._groups[group] = groups_of(group)
            for bytes_sent in self.bytes_by_group:
                bytes_sent[group] = 0
        if group not in self._groups:
            raise Unsupported(f"no group named {group!r}; known: {', '.join(self._groups)}")
        answers: dict[int, Tensor] = {}
        mismatch = len(present) < self.size or len(names) > 1
        for ranks in self._groups["world" if mismatch else group]:
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
    """Run one step of a new :class:`Simulation`, with one rank for each dict of gradients, and return the updates.

    Args:
        policy: a policy, or its spec string.
        grads_per_rank: for each rank its gradients, by name.
        weights: for each rank its weight; None: all equal.

    >>> simulate("sum", [{"w": torch.tensor([1., 2.])}, {"w": torch.tensor([3., 4.])}])[1]
    {'w': tensor([4., 6.])}
    """
    params = {name: grad for grads in grads_per_rank for name, grad in grads.items() if grad is not None}
    return Simulation(policy, params, len(grads_per_rank)).step(grads_per_rank, weights)


def execute(requests: Sequence[Collective]) -> list[Tensor]:
    """Answer one collective for all ranks of its group, where ``requests[i]`` is the request of rank i.

    Raises:
        Unsupported: the tensor of AllToAll or ReduceScatter does not have one row per rank.
    """
    answers = _answers(requests)
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if isinstance(request, AllGather | AllToAll) and (out := output_of(request, answer.numel())) is not None:
            answers[i] = out.view(answer.shape).copy_(answer)
    return answers


def _answers(requests: Sequence[Collective]) -> list[Tensor]:
    """Return the answers, none of which overlaps with another one or with a request."""
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
    """Check that all ranks of a group request the same collective.

    Raises:
        CollectiveMismatch: signatures differ. The message lists the ranks of each.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, request in requests.items():
        ranks_of.setdefault("nothing (its flow has ended)" if request is None else request.signature(), []).append(rank)
    if len(ranks_of) > 1:
        lines = "".join(f"\n  ranks {ranks}: {signature}" for signature, ranks in ranks_of.items())
        raise CollectiveMismatch(f"ranks of one group asked for different collectives:{lines}")


def _parameter(name: str, given: Tensor | Sequence[int], grads_per_rank: Sequence[Gradients]) -> Tensor:
    """Return a tensor of the parameter's shape, dtype and device: the parameter itself, or zeros."""
    if isinstance(given, Tensor):
        return given.detach()
    grads = (grad for grads in grads_per_rank if (grad := grads.get(name)) is not None)
    example = next(grads, torch.empty(0, device="cpu"))
    return torch.zeros(torch.Size(given), dtype=example.dtype, device=example.device)


def _rank_and_size(rank: int, lists: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the rank in, and the size of, the group among ``lists`` that contains ``rank``."""
    return next((ranks.index(rank), len(ranks)) for ranks in lists if rank in ranks)
