"""Two-level aggregation: dense within a node, any policy between nodes.

Rules:

1. A node is one rank of the inner policy. Its gradient is the weighted mean of its ranks' gradients; its weight is the
   sum of their weights.
2. All ranks of a node run the same inner flow on equal bits. Each of its messages is cut into one chunk per lane. Each
   rank exchanges its lane's chunk with other nodes, and then the node's ranks gather the chunks of the answer. A node
   thus sends as many bytes as one rank of the inner policy would, over the links of all its ranks at once.
3. A lane is a local rank number that exists on every node. Ranks with higher numbers take part in all collectives, but
   no result contains what they send.
4. Memory: beside the inner policy's memory, one chunk of each message, and a buffer for the joined answer if the
   request's ``out`` does not fit.
5. All ranks return the inner flow's result, computed from equal bits.
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
    """Weighted mean within each node, then the inner policy across nodes; all ranks get the result.

    Example: ``hierarchical(powersgd(rank=4))``. The links between nodes carry the inner policy's messages. The links
    within a node carry the gradient once (an all-reduce) and the answers to the inner policy's messages. Put error
    feedback inside: ``hierarchical(ef(bf16))``.

    State: that of the inner policy, equal on all ranks of a node. The weight of a node is the sum of its ranks' weights
    (without weights: its number of ranks), so nodes of unequal size have unequal weights.

    On the wire, with K nodes of L ranks: within its node one rank sends ``2 (L-1)/L`` of the gradient, and ``(L-1)/L``
    of each answer to the inner policy. Between nodes it sends 1/L of what the inner policy sends among K ranks. Nodes
    may be of unequal size.

    When to choose:
        Links within a node are fast, and links between nodes are slow.

    Attributes:
        inner: the policy across nodes.

    Raises:
        Unsupported: it is not known which ranks share a node, or the inner policy names groups of its own.
        ConfigurationError: the inner policy is not defined for this number of nodes.
        WeightError: the inner policy refuses unequal weights, and the nodes' weights are unequal.
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
        # Ranks of a node had equal updates, so their parameters are equal: no collective within the node is needed.
        return self._across(bucket, state, self.inner.after_step)

    def _across(self, bucket: Bucket, state: State, start: Callable[[Bucket, State], Flow]) -> Flow:
        node_of = bucket.ranks.nodes
        nodes = list(dict.fromkeys(node_of))
        weights = None
        given = bucket.decide(lambda _, weights: weights)
        if given is not None or len({node_of.count(node) for node in nodes}) > 1:
            rank_weights = given or (1.0,) * bucket.size
            weights = tuple(sum(w for w, n in zip(rank_weights, node_of, strict=True) if n == node) for node in nodes)
            check_weights(self.inner, weights, len(nodes))
        inner = replace(bucket, ranks=Ranks(nodes.index(node_of[bucket.rank]), len(nodes), weights))
        lanes = Lanes(bucket, len(nodes), min(map(node_of.count, nodes)))
        result = yield from rewrite(start(inner, state["inner"]), lanes.exchange)
        return Aggregated(result.update, state={"inner": result.state})


class Lanes:
    """Exchange of requests between nodes in ``count`` chunks, one per lane.

    Args:
        nodes: number of nodes.
        count: number of lanes, the size of the smallest node.
    """

    def __init__(self, bucket: Bucket, nodes: int, count: int) -> None:
        self.nodes, self.count, self.pool = nodes, count, bucket.pool
        self.lane, self.local_size = bucket.place("node")
        self.several_per_node = nodes < bucket.size  # equal on all ranks, so that their requests are equal
        _, self.cross_size = bucket.place("cross")

    def exchange(self, request: Collective) -> Exchange:
        """Answer ``request`` of the inner flow as a group with one rank per node would.

        Raises:
            Unsupported: ``request`` names another group than the default, ``"world"``.
        """
        if request.group != "world":
            raise Unsupported(f"{request.signature()}: between nodes there is one group, the nodes")
        tensor = request.tensor
        rows = self.nodes if isinstance(request, AllToAll | ReduceScatter) else 1
        width = tensor.numel() // rows
        chunk_length = -(-width // self.count)
        flat = tensor.reshape(rows, width)
        if self.count * chunk_length != width:
            flat = torch.cat([flat, flat.new_zeros(rows, self.count * chunk_length - width)], 1)
        chunk = flat.view(rows, self.count, chunk_length)[:, self.lane % self.count]
        answer = yield self._send(request, chunk)
        answer_rows = self.nodes if isinstance(request, AllToAll | AllGather) else 1
        shape = request.answer_shape(self.nodes)
        if not self.several_per_node:
            return answer.reshape(shape)
        own = answer if self.lane < self.count else answer.new_zeros(answer_rows * chunk_length)
        chunks = yield AllGather(
            own.reshape(-1), "node", self.pool.take(self.local_size * own.numel(), own.dtype, own.device)
        )
        output = output_of(request, answer_rows * width) if isinstance(request, AllToAll | AllGather) else None
        output = tensor.new_empty(answer_rows * width) if output is None else output
        for lane, part in enumerate(chunks[: self.count].view(self.count, answer_rows, chunk_length)):
            target = output.view(answer_rows, width)[:, lane * chunk_length : (lane + 1) * chunk_length]
            target.copy_(part[:, : target.shape[1]])
        self.pool.give(chunks, but=[own])
        return output.view(shape)

    def _send(self, request: Collective, chunk: Tensor) -> Collective:
        """Return the request between nodes for this rank's chunk.

        The cross group of a rank without a lane consists of ranks without a lane, which ignore the answer.
        """
        if isinstance(request, Broadcast):
            return Broadcast(chunk.contiguous(), request.root if self.lane < self.count else 0, group="cross")
        if isinstance(request, AllToAll | ReduceScatter) and self.lane >= self.count:
            chunk = chunk[: self.cross_size]
        return replace(request, tensor=chunk.contiguous(), group="cross")  # type: ignore[call-arg]
