"""Two levels: dense within a node, any policy between nodes.

Rules:

1. A node is one rank of the inner policy: its gradient is the weighted mean of its ranks', its weight the sum.
2. All ranks of a node run the inner flow alike, on the same bits. What it asks for is cut into as many pieces as there
   are lanes; each rank sends one piece to the other nodes, and the pieces come together within the node.
   So a node sends as much as one rank of the inner policy would, over all its ranks' links at once.
3. A lane is a local rank that every node has. Ranks beyond take part in everything and send nothing.
4. Memory: beside what the inner policy needs, a piece of each of its messages, and a buffer for the joined pieces of
   the answer where the request's ``out`` does not fit.
5. Every rank ends with what the inner flow returned, computed from the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hvdbridge.errors import Unsupported
from hvdbridge.policies.dense import MEAN
from hvdbridge.policies.local import share_in_node
from hvdbridge.policy.base import Aggregated, Branch, Exchange, Flow, Policy, State, check_weights, rewrite
from hvdbridge.policy.bucket import Bucket, Ranks, scale
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter, output_of


@dataclass(frozen=True)
class Hierarchical(Policy):
    """A dense sum inside each node, the inner policy across nodes, and the result on all ranks.

    ``hierarchical(powersgd(rank=4))``: the slow links between nodes carry what the inner policy sends, the fast ones
    inside carry the gradient once (an all-reduce) and the inner policy's answers. State of the inner policy belongs to
    the node: its ranks hold the same. Feedback stands inside, too: ``hierarchical(ef(bf16))``.

    With N ranks on K nodes of L ranks one rank sends ``2 (L-1)/L`` of the gradient inside its node, and between nodes
    1/L of what the inner policy sends at K ranks. Nodes may be of unequal size.

    Raises:
        Unsupported: it is not known which ranks share a node, or the inner policy asks for groups of its own.
        ConfigurationError: the inner policy is none for so many nodes.
        WeightError: the inner policy refuses unequal weights, and those of the nodes are unequal.
    """

    inner: Policy = MEAN
    additive = False
    slots = {"inner": Branch(nodes=True)}

    @property
    def rounds(self) -> int | None:
        return None if self.inner.rounds is None else 1 + 2 * self.inner.rounds

    def check_size(self, size: int, nodes: int | None = None) -> None:
        if nodes is not None:
            self.inner.check_size(nodes)

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        flat = bucket.buffer
        factor = share_in_node(bucket)
        if not bucket.scaled:
            scale(flat, factor)
        if len(set(bucket.ranks.nodes)) < bucket.size:
            flat = yield AllReduce(flat, group="node")
        return (yield from self._across(bucket.with_buffer(flat), state, self.inner.aggregate))

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        # Within a node gradients were the same, and so are parameters.
        return self._across(bucket, state, self.inner.after_step)

    def _across(self, bucket: Bucket, state: State, start: Callable[[Bucket, State], Flow]) -> Flow:
        at = bucket.ranks.nodes
        nodes = list(dict.fromkeys(at))
        weights = None
        if bucket.weights is not None or len({at.count(node) for node in nodes}) > 1:
            given = bucket.weights or (1.0,) * bucket.size
            weights = tuple(sum(w for w, its in zip(given, at, strict=True) if its == node) for node in nodes)
            check_weights(self.inner, weights, len(nodes))
        inner = replace(bucket, ranks=Ranks(nodes.index(at[bucket.rank]), len(nodes), weights))
        lanes = Lanes(bucket, len(nodes), min(map(at.count, nodes)))
        result = yield from rewrite(start(inner, state["inner"]), lanes.carry)
        return Aggregated(result.update, state={"inner": result.state})


class Lanes:
    """How a request among nodes travels: in ``count`` pieces, one per local rank."""

    def __init__(self, bucket: Bucket, nodes: int, count: int) -> None:
        self.nodes, self.count, self.pool = nodes, count, bucket.pool
        self.lane, self.local = bucket.place("node")
        self.shared = nodes < bucket.size  # on no node alone, or all ranks would not ask for the same
        _, self.reached = bucket.place("cross")

    def carry(self, request: Collective) -> Exchange:
        """Answer ``request`` as the group of the nodes would.

        Raises:
            Unsupported: it names a group.
        """
        if request.group != "world":
            raise Unsupported(f"{request.signature()}: between nodes there is one group, the nodes")
        tensor = request.tensor
        rows = self.nodes if isinstance(request, AllToAll | ReduceScatter) else 1
        width = tensor.numel() // rows
        length = -(-width // self.count)
        flat = tensor.reshape(rows, width)
        if self.count * length != width:
            flat = torch.cat([flat, flat.new_zeros(rows, self.count * length - width)], 1)
        piece = flat.view(rows, self.count, length)[:, self.lane % self.count]
        answer = yield self._send(request, piece)
        outer = self.nodes if isinstance(request, AllToAll | AllGather) else 1
        shape = request.answer_shape(self.nodes)
        if not self.shared:
            return answer.reshape(shape)
        mine = answer if self.lane < self.count else answer.new_zeros(outer * length)
        parts = yield AllGather(
            mine.reshape(-1), "node", self.pool.take(self.local * mine.numel(), mine.dtype, mine.device)
        )
        whole = output_of(request, outer * width) if isinstance(request, AllToAll | AllGather) else None
        whole = tensor.new_empty(outer * width) if whole is None else whole
        for lane, part in enumerate(parts[: self.count].view(self.count, outer, length)):
            here = whole.view(outer, width)[:, lane * length : (lane + 1) * length]
            here.copy_(part[:, : here.shape[1]])
        self.pool.give(parts, but=[mine])
        return whole.view(shape)

    def _send(self, request: Collective, piece: Tensor) -> Collective:
        """This rank's piece. A rank without a lane sends it to the few others without one, which ignore it."""
        if isinstance(request, Broadcast):
            return Broadcast(piece.contiguous(), request.root if self.lane < self.count else 0, group="cross")
        if isinstance(request, AllToAll | ReduceScatter) and self.lane >= self.count:
            piece = piece[: self.reached]
        return replace(request, tensor=piece.contiguous(), group="cross")  # type: ignore[call-arg]
