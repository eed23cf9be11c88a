"""Sign policies: one bit per element in messages, in both directions.

Rules:

1. They use the sharded scheme: ranks send packed signs to their owners, which send packed signs back.
   (``efsign:exact=true`` gathers all ranks' signs instead.)
2. Each parameter begins a word of 32 bits, or a block of 1024 elements, so the result does not depend on bucket
   boundaries.
3. If there is no scale that could be NaN or inf, one bit per parameter reports elements that are not finite. Ranks send
   these bits to the owners with the signs. The owners merge them and send them back with the result.
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
"""Number of elements that are copied to or from words at a time, few enough for a CPU's cache."""


@dataclass(frozen=True)
class Sign(Policy):
    """Majority vote: ``update = scale * sign(sum_r w_r sign(g_r))`` (Bernstein 2018, algorithm 3).

    With ``momentum`` (Signum; Bernstein 2018, algorithm 2) each rank votes with the sign of its local
    ``m = momentum m + (1 - momentum) g``.

    A bit has no zero. A gradient of exactly 0 counts as + in even steps and as - in odd ones. A random bit decides a
    tie: one per element, common to all ranks, drawn in even steps and inverted in the following odd step. So a
    parameter whose gradients are all 0 returns to its value after every second step.

    Weights are votes. The policy is not additive, so error feedback does not apply; use :class:`EfSign` for that.
    On the wire: 1 bit per element and 1 per parameter, in each of an all-to-all and an all-gather.

    Source:
        Bernstein et al., *signSGD: compressed optimisation for non-convex problems*, 2018, algorithms 2 and 3.

    When to choose:
        One bit per element is needed without a residual. The optimizer is plain SGD with a small rate of its own.

    Attributes:
        scale: magnitude of all elements of the update. A GradScaler divides it by its scale.
        momentum: coefficient of the momentum; 0: none.
    """

    scale: float = option(1.0, above=0)
    momentum: float = option(0.0, at_least=0, below=1)
    slots: ClassVar[Mapping[str, Slot]] = {"momentum": Slot(local=True, gradient_units=True, reused=True)}
    additive = False
    rounds = 2
    deterministic = False  # ties are decided by random bits

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {"momentum": residuals(params)} if self.momentum else {}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        layout, flat, size = bucket.layout, bucket.buffer, bucket.size
        words = layout.derive("words", lambda: SignWords(layout))
        votes, new_state = flat, None
        if self.momentum and not bucket.excluded:
            old = flatten(state["momentum"], layout)
            votes = torch.mul(old, self.momentum, out=bucket.fresh(old)).add_(flat, alpha=1 - self.momentum)
            new_state = {"momentum": Views(layout, votes)}
        length = -(-words.count // size)
        signs = torch.zeros(size * length, dtype=torch.int32, device=flat.device)
        signs[: words.count] = words.pack(votes >= 0 if bucket.decide(_is_even) else votes > 0)
        fault_bits = as_words(poison(votes, layout).isnan())
        rows = torch.cat([signs.view(size, length), fault_bits.expand(size, -1)], dim=1)
        received = yield AllToAll(rows)
        weights = weights_of(bucket)
        if len(weights) < size:
            # Indexing a GPU tensor by a list would make the host wait
            received = torch.stack([received[rank] for rank in participants(bucket)])
        ballots, faults = received.split([length, fault_bits.numel()], dim=1)
        merged_faults = faults[0]
        for rank_faults in faults[1:]:
            merged_faults = merged_faults | rank_faults
        tie_bits = self._tie_bits(bucket, words, length)
        equal_weights = len(set(weights)) == 1
        majority_bits = majority(ballots, tie_bits) if equal_weights else weighted_majority(ballots, weights, tie_bits)
        received = yield AllGather(torch.cat([majority_bits, merged_faults]))
        signs, faults = received.split([length, fault_bits.numel()], dim=1)
        update = words.unpack(signs.reshape(-1)[: words.count], self.scale, flat)
        flags = unpack_bits(faults[0].contiguous().view(torch.uint8), len(layout.names)).view(torch.bool)
        fill_nan(update, layout, flags)
        return Aggregated(update, state=new_state)

    def _tie_bits(self, bucket: Bucket, words: SignWords, length: int) -> Tensor:
        """Return the bits that decide ties in the words that this rank owns, int32 ``[length]``."""
        numbers = words.numbers(first_blocks(bucket), bucket.rank * length, length, bucket.buffer.device)
        seed = bucket.seed
        seeds = bucket.integers(lambda step: [key(seed, step // 2, "tie", half) for half in (0, 1)])
        low, high = (hashed_bits(numbers, seed) for seed in seeds)
        tie_bits = low ^ (high << 8)
        return tie_bits if bucket.decide(_is_even) else ~tie_bits


def _is_even(step: int, _: object) -> bool:
    return step % 2 == 0


@dataclass(frozen=True)
class EfSign(WithFeedback):
    """Scaled signs with error feedback: ``sent = mean|p| sign(p)`` (Karimireddy 2019, algorithm 1, EF-signSGD).

    There is one scale per block (as in Zheng 2019, section 4.2), which loses less than one per layer. sign(0) = +.

    The sum of N scaled signs has up to N + 1 values. To send it back in one bit, the owner encodes it as scaled signs
    again; the error becomes part of the owner's residual (Zheng 2019, algorithm 2). ``exact`` is the paper's own
    update, ``sum_r sent_r``.

    On the wire: 1 bit per element and 4 bytes per block in each of an all-to-all and an all-gather, so ``2 (N-1)/N``
    bits per element. With ``exact``, in one all-gather, so N - 1 bits per element: the same at 2 ranks, and no less
    than a dense float32 all-reduce at 64.

    Source:
        Karimireddy et al., *Error feedback fixes SignSGD*, 2019, algorithm 1; Zheng et al., *Communication-efficient
        distributed blockwise momentum SGD with error-feedback*, 2019, section 4.2 and algorithm 2.

    When to choose:
        One bit per element is needed, and memory for the second residual of ``onebit`` is not available.

    Attributes:
        block: number of elements that share a scale; a power of two from 16 to 1024.
        exact: every rank receives every rank's signs.
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
        messages = yield AllGather(message)
        del message
        update = bucket.output(accumulator(flat.dtype)).zero_()
        for message in messages:
            bits, rank_scales = code.from_wire(message[4 * blocks.count :], flat.numel()), message[: 4 * blocks.count]
            rank_scales = rank_scales.clone().view(torch.float32).unsqueeze(0)  # aligned memory
            decode(code, bits.unsqueeze(0), rank_scales, blocks, update, add=1)
        return Aggregated(update, rest=rest)


@dataclass(frozen=True)
class OneBit(WithFeedback):
    """Scaled signs in both directions, with error feedback on both sides (Tang 2019, algorithm 1, DoubleSqueeze).

    With C the scaled sign, every rank is a worker, and the owner of each block its server::

        p = g w/sum(w) + e;           send C(p);  e = p - C(p)
        v = sum_r C(p_r) + e_server;  send C(v);  e_server = v - C(v)

    The server's error is added to the sum uncompressed, while :class:`EfSign` sends it with the owner's next signs.
    Updates, residuals and servers' errors sum to the inputs, with one exception: a rank of weight 0 does not change its
    residual and its server's error, so its error as a server in that step is lost. When the number of ranks changes,
    blocks get other owners, and the servers' errors become part of the residuals.

    On the wire: 1 bit per element and 4 bytes per block, in each of an all-to-all and an all-gather.

    Source:
        Tang et al., *DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
        compression*, 2019, algorithm 1.

    When to choose:
        One bit per element is needed at any number of ranks, and each rank has memory for two residuals.

    Attributes:
        block: number of elements that share a scale; a power of two from 16 to 1024.
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
        server_error = None
        if self.ef and not bucket.excluded:
            server_error = flatten(state["server"], bucket.layout)
        coded = yield from sharded_code(bucket, ScaledSign(), self.block, owner_error=server_error)
        if coded.error is None:
            return coded.aggregated
        return replace(coded.aggregated, state={"server": Views(bucket.layout, coded.error)})


class SignWords:
    """Layout of a vector's signs in int32 words, one bit per element; every parameter starts a new word.

    Attributes:
        count: number of words.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.count = sum(-(-size // WORD) for size in layout.sizes.values())
        self._parts = [] if self.count * WORD == layout.numel else self._split()
        """Per part, the number of words and the runs of their bits; empty if the vector needs no padding."""

    def _split(self) -> list[tuple[int, Runs]]:
        """Return parts of about :data:`CHUNK` bits: the number of words, and the runs from the vector to their bits."""
        parts: list[tuple[int, Runs]] = []
        words, runs = 0, []
        for name, size in self.layout.sizes.items():
            for skip in range(0, size, CHUNK):
                length = min(CHUNK, size - skip)
                runs.append((self.layout.offsets[name] + skip, words * WORD, length))
                words += -(-length // WORD)
                if words * WORD >= CHUNK:
                    parts.append((words, Runs(runs)))
                    words, runs = 0, []
        return [*parts, (words, Runs(runs))] if runs else parts

    def pack(self, bits: Tensor) -> Tensor:
        """Pack bool ``[layout.numel]`` into words, int32 ``[count]``."""
        if not self._parts:
            return as_words(bits)
        bits = bits.view(torch.uint8)
        packed = []
        for words, runs in self._parts:
            padded = torch.zeros(words * WORD, dtype=torch.uint8, device=bits.device)
            packed.append(as_words(runs.to(bits, padded)))
        return torch.cat(packed)

    def unpack(self, words: Tensor, magnitude: float, out: Tensor) -> Tensor:
        """Write ``magnitude`` with the signs of ``words``, int32 ``[count]``, to ``out`` ``[numel]``; return it."""
        if not self.layout.numel:
            return out
        bits = torch.arange(256, device=out.device)[:, None] >> torch.arange(8, device=out.device) & 1
        table = (bits * 2 - 1).to(out.dtype).mul_(magnitude)
        index = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).to(torch.int32)
        if not self._parts:
            torch.index_select(table, 0, index, out=out.view(-1, 8))
        offset = 0
        for count, runs in self._parts:
            runs.back(out, table.index_select(0, index[offset : offset + 4 * count]).view(-1))
            offset += 4 * count
        return out

    def numbers(self, first: Mapping[str, int], start: int, count: int, device: torch.device) -> Tensor:
        """Return the model-wide numbers of ``count`` words from word ``start`` on, int32 ``[count]``.

        Padding after the last word gets arbitrary numbers.
        """

        def make() -> tuple[Tensor, Tensor]:
            counts, shifts, first_word = [], [], -start
            for name, size in self.layout.sizes.items():
                end_word = first_word + -(-size // WORD)
                counts.append(max(0, min(end_word, count) - max(first_word, 0)))
                shifts.append(first[name] * (BLOCK // WORD) - first_word)
                first_word = end_word
            table = torch.tensor([[*counts, count - sum(counts)], [*shifts, 0]], device="cpu").to(device)
            return table[0], table[1].int()

        key = ("words", start, count, device, tuple(first[name] for name in self.layout.names))
        counts, shifts = self.layout.derive(key, make)
        word_shifts = shifts.index_select(0, owners(counts, count))
        return word_shifts.add_(torch.arange(count, dtype=torch.int32, device=device))


def as_words(bits: Tensor) -> Tensor:
    """Pack bool (or uint8 0 and 1) ``[n]`` into int32 words ``[ceil(n / 32)]``, the first bit lowest.

    >>> as_words(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.int32)
    """
    packed = pack_bits(bits)
    return torch.nn.functional.pad(packed, (0, -packed.numel() % 4)).view(torch.int32)


def fill_nan(flat: Tensor, layout: Layout, faulty: Tensor) -> None:
    """Fill the parameters that ``faulty``, bool ``[parameters]``, marks with NaN."""
    if layout.readable(flat):
        if bool(faulty.any()):
            views = Views(layout, flat)
            for name, fault in zip(layout.names, faulty.tolist(), strict=True):
                if fault:
                    views[name].fill_(math.nan)
        return
    flat.masked_fill_(layout.spread(faulty), math.nan)
