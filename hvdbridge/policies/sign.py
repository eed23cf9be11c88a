"""Signs: one bit per element on the wire, in both directions.

Rules:

1. By the sharded scheme: signs go packed to their owners, and come back packed. (``efsign:exact=true`` gathers them.)
2. Every parameter begins a word of 32 bits, or a block of 1024 elements, so the result does not depend on bucket
   boundaries.
3. Where no scale carries NaN and inf, one bit per parameter does: with the signs to the owners, who merge these bits,
   and with the result back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.kernels.pack import pack_bits, unpack_bits
from hvdbridge.kernels.quantise import decode, encode
from hvdbridge.kernels.random import hashed_bits, key
from hvdbridge.kernels.runs import Runs
from hvdbridge.kernels.select import owners, poison
from hvdbridge.kernels.signs import ScaledSign, majority, weighted_majority
from hvdbridge.policies.combining import participants, weights_of
from hvdbridge.policies.feedback import WithFeedback, residuals
from hvdbridge.policies.sharded import blocks_of, check_block, sharded_code
from hvdbridge.policies.shards import accumulator, first_blocks
from hvdbridge.policy.base import Aggregated, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import BLOCK, Bucket, Layout, Views, flatten
from hvdbridge.policy.collectives import AllGather, AllToAll
from hvdbridge.policy.options import option

WORD = 32
CHUNK = 1 << 18
"""Elements at a time where they must be copied to their words, and back: few, so that a CPU's cache holds them."""


@dataclass(frozen=True)
class Sign(Policy):
    """Majority vote: ``update = scale * sign(sum_r w_r sign(g_r))`` (Bernstein 2018, algorithm 3).

    With ``momentum`` (Signum; Bernstein 2018, algorithm 2) each rank votes with the sign of
    ``m = momentum m + (1 - momentum) g``, which it keeps for itself.

    A bit has no zero. A gradient of exactly 0 counts as + in even steps and as - in odd ones. A random bit
    decides a tie: one for each element, common to all ranks, drawn in even steps and inverted in the odd step that
    follows. So a parameter that no rank moves is where it was after every second step.

    Weights are votes. Not additive: error feedback does not apply; :class:`EfSign` is for that.
    On the wire: 1 bit per element and 1 per parameter, in each of an all-to-all and an all-gather.

    Attributes:
        scale: magnitude of all elements of the update.
        momentum: 0: none.
    """

    scale: float = option(1.0, above=0)
    momentum: float = option(0.0, at_least=0, below=1)
    slots: ClassVar[Mapping[str, Slot]] = {"momentum": Slot(local=True, gradient_units=True, reused=True)}
    additive = False
    rounds = 2
    deterministic = False  # but for ties it is

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {"momentum": residuals(params)} if self.momentum else {}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        layout, flat, size = bucket.layout, bucket.buffer, bucket.size
        words = layout.derive("words", lambda: Words(layout))
        votes, new = flat, None
        if self.momentum and bucket.weight > 0:
            old = flatten(state["momentum"], layout)
            votes = torch.mul(old, self.momentum, out=bucket.fresh(old)).add_(flat, alpha=1 - self.momentum)
            new = {"momentum": Views(layout, votes)}
        length = -(-words.count // size)
        signs = torch.zeros(size * length, dtype=torch.int32, device=flat.device)
        signs[: words.count] = words.pack(votes >= 0 if bucket.step % 2 == 0 else votes > 0)
        faults = as_words(poison(votes, layout).isnan())
        rows = torch.cat([signs.view(size, length), faults.expand(size, -1)], dim=1)
        answer = yield AllToAll(rows)
        weights = weights_of(bucket)
        if len(weights) < size:
            # A list as index would wait for a GPU
            answer = torch.stack([answer[rank] for rank in participants(bucket)])
        ballots, faulty = answer.split([length, faults.numel()], dim=1)
        merged = faulty[0]
        for other in faulty[1:]:
            merged = merged | other
        coins = self._coins(bucket, words, length)
        equal = len(set(weights)) == 1
        result = majority(ballots, coins) if equal else weighted_majority(ballots, weights, coins)
        answer = yield AllGather(torch.cat([result, merged]))
        signs, faulty = answer.split([length, faults.numel()], dim=1)
        update = words.unpack(signs.reshape(-1)[: words.count], self.scale, flat)
        flags = unpack_bits(faulty[0].contiguous().view(torch.uint8), len(layout.names)).view(torch.bool)
        spoil(update, layout, flags)
        return Aggregated(update, state=new)

    def _coins(self, bucket: Bucket, words: Words, length: int) -> Tensor:
        """Bits for the words that this rank owns, int32 ``[length]``."""
        numbers = words.numbers(first_blocks(bucket), bucket.rank * length, length, bucket.buffer.device)
        low, high = (hashed_bits(numbers, key(bucket.seed, bucket.step // 2, "tie", half)) for half in (0, 1))
        coins = low ^ (high << 8)
        return coins if bucket.step % 2 == 0 else ~coins


@dataclass(frozen=True)
class EfSign(WithFeedback):
    """Scaled signs with error feedback: ``sent = mean|p| sign(p)`` (Karimireddy 2019, algorithm 1, EF-signSGD).

    Scales are by blocks (as in Zheng 2019, section 4.2), which lose less than one scale per layer. sign(0) = +.

    The sum of N scaled signs has up to N + 1 values, so to come back in one bit it is a scaled sign again; what that
    loses is in the owner's residual (Zheng 2019, algorithm 2). ``exact`` is the paper's own update, ``sum_r sent_r``.

    On the wire: 1 bit per element and 4 bytes per block in each of an all-to-all and an all-gather, so
    ``2 (N-1)/N`` bits per element; with ``exact`` in one all-gather, so N - 1 bits per element: the same at 2 ranks,
    and no less than a dense float32 all-reduce at 64.

    Attributes:
        block: elements that share a scale; a power of two from 16 to 1024.
        exact: every rank gets every rank's signs.
        ef: error feedback.
    """

    block: int = BLOCK
    exact: bool = False
    ef: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self, self.block)

    @property
    def rounds(self) -> int:
        return 1 if self.exact else 2

    def compress(self, bucket: Bucket, state: State) -> Flow:
        code = ScaledSign()
        if not self.exact:
            return (yield from sharded_code(bucket, code, self.block)).aggregated
        flat = bucket.weighted().buffer
        blocks = blocks_of(bucket, self.block)
        codes, scales = encode(code, flat, blocks)
        assert scales is not None
        rest = None
        if bucket.needs_sent:
            rest = decode(code, codes.unsqueeze(0), scales.unsqueeze(0), blocks, flat, add=-1)
        message = torch.cat([scales.view(torch.uint8), code.to_wire(codes)])
        del codes, scales
        answer = yield AllGather(message)
        del message
        update = bucket.output(accumulator(flat.dtype)).zero_()
        for message in answer:
            bits, theirs = code.from_wire(message[4 * blocks.count :], flat.numel()), message[: 4 * blocks.count]
            theirs = theirs.clone().view(torch.float32).unsqueeze(0)  # where they lie aligned
            decode(code, bits.unsqueeze(0), theirs, blocks, update, add=1)
        return Aggregated(update, rest=rest)


@dataclass(frozen=True)
class OneBit(WithFeedback):
    """Scaled signs both ways, with error feedback on both sides (Tang 2019, algorithm 1, DoubleSqueeze).

    With C the scaled sign, every rank as a worker, and the owner of each block::

        p = g w/sum(w) + e;           send C(p);  e = p - C(p)
        v = sum_r C(p_r) + e_server;  send C(v);  e_server = v - C(v)

    The server's error is added to the sum as it is, while :class:`EfSign` sends it through the owner's next signs.
    Updates, residuals and servers' errors sum to the inputs, but for one case: a rank of weight 0 keeps both as they
    are, so what it fails to send as a server in that step is lost. When the number of ranks changes, blocks have other
    owners: the servers' errors become part of the residuals.

    On the wire: 1 bit per element and 4 bytes per block, in each of an all-to-all and an all-gather.

    Attributes:
        block: elements that share a scale; a power of two from 16 to 1024.
        ef: error feedback, on both sides.
    """

    block: int = BLOCK
    ef: bool = True
    rounds = 2
    slots: ClassVar[Mapping[str, Slot]] = {"server": Slot(local=True, gradient_units=True, owned=True, reused=True)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self, self.block)

    def fresh(self, params: Mapping[str, Tensor]) -> State:
        return {"server": residuals(params)} if self.ef else {}

    def compress(self, bucket: Bucket, state: State) -> Flow:
        carry = None
        if self.ef and bucket.weight > 0:
            carry = flatten(state["server"], bucket.layout)
        coded = yield from sharded_code(bucket, ScaledSign(), self.block, carry=carry)
        if coded.error is None:
            return coded.aggregated
        return replace(coded.aggregated, state={"server": Views(bucket.layout, coded.error)})


class Words:
    """A bit per element in words of 32; every parameter starts a new one."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.count = sum(-(-size // WORD) for size in layout.sizes.values())
        self._parts = [] if self.count * WORD == layout.numel else self._cut()
        """Where words are not the vector itself: how many words, and the offsets of their bits."""

    def _cut(self) -> list[tuple[int, Runs]]:
        parts: list[tuple[int, Runs]] = []
        words, runs = 0, []
        for name, size in self.layout.sizes.items():
            for skip in range(0, size, CHUNK):
                some = min(CHUNK, size - skip)
                runs.append((self.layout.offsets[name] + skip, words * WORD, some))
                words += -(-some // WORD)
                if words * WORD >= CHUNK:
                    parts.append((words, Runs(runs)))
                    words, runs = 0, []
        return [*parts, (words, Runs(runs))] if runs else parts

    def pack(self, bits: Tensor) -> Tensor:
        """``[layout.numel]`` bool -> int32 ``[count]``."""
        if not self._parts:
            return as_words(bits)
        bits = bits.view(torch.uint8)
        found = []
        for words, runs in self._parts:
            padded = torch.zeros(words * WORD, dtype=torch.uint8, device=bits.device)
            found.append(as_words(runs.to(bits, padded)))
        return torch.cat(found)

    def unpack(self, words: Tensor, magnitude: float, out: Tensor) -> Tensor:
        """int32 ``[count]`` -> ``magnitude`` with those signs, into ``out``, ``[layout.numel]``, which is returned."""
        if not self.layout.numel:
            return out
        bits = torch.arange(256, device=out.device)[:, None] >> torch.arange(8, device=out.device) & 1
        table = (bits * 2 - 1).to(out.dtype).mul_(magnitude)
        index = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).to(torch.int32)
        if not self._parts:
            torch.index_select(table, 0, index, out=out.view(-1, 8))
        at = 0
        for count, runs in self._parts:
            runs.back(out, table.index_select(0, index[at : at + 4 * count]).view(-1))
            at += 4 * count
        return out

    def numbers(self, first: Mapping[str, int], at: int, count: int, device: torch.device) -> Tensor:
        """int32 ``[count]``: the whole model's numbers of the words from ``at`` on; behind the last, any."""

        def make() -> tuple[Tensor, Tensor]:
            inside, shifts, begin = [], [], -at
            for name, size in self.layout.sizes.items():
                end = begin + -(-size // WORD)
                inside.append(max(0, min(end, count) - max(begin, 0)))
                shifts.append(first[name] * (BLOCK // WORD) - begin)
                begin = end
            table = torch.tensor([[*inside, count - sum(inside)], [*shifts, 0]], device="cpu").to(device)
            return table[0], table[1].int()

        key = ("words", at, count, device, tuple(first[name] for name in self.layout.names))
        inside, shifts = self.layout.derive(key, make)
        own = shifts.index_select(0, owners(inside, count))
        return own.add_(torch.arange(count, dtype=torch.int32, device=device))


def as_words(bits: Tensor) -> Tensor:
    """``[n]`` bool, or uint8 0 and 1, as int32 ``[ceil(n / 32)]``, the first bit lowest.

    >>> as_words(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.int32)
    """
    packed = pack_bits(bits)
    return torch.nn.functional.pad(packed, (0, -packed.numel() % 4)).view(torch.int32)


def spoil(flat: Tensor, layout: Layout, faulty: Tensor) -> None:
    """Make NaN of the parameters that ``faulty``, bool, one per parameter, points at."""
    if flat.device.type == "cpu":  # the host may look
        if bool(faulty.any()):
            views = Views(layout, flat)
            for name, fault in zip(layout.names, faulty.tolist(), strict=True):
                if fault:
                    views[name].fill_(math.nan)
        return
    flat.masked_fill_(layout.spread(faulty), math.nan)
