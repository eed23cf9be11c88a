"""int8, int4, fp8: quantised in blocks, each with a scale of its own (Dettmers 2022, section 2.1).

Rules:

1. By the sharded scheme (:func:`~hvdbridge.policies.sharded.sharded_code`): every rank's shares travel quantised to
   their owners, who add them in float32 in rank order, quantise the sum, and send it to all.
2. Blocks start anew at each parameter, so the result does not depend on bucket boundaries.
3. A block with NaN or inf in it comes back non-finite, whole, on every rank.
4. ``rounding="nearest"`` errs least per step, but errs alike every time; ``"stochastic"`` is unbiased: private noise
   towards the owner, the owner's own on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdbridge.kernels.codes import Float8, Linear, Rounding
from hvdbridge.kernels.quantise import Code
from hvdbridge.policies.feedback import WithFeedback
from hvdbridge.policies.sharded import check_block, sharded_code
from hvdbridge.policy.base import Flow, State
from hvdbridge.policy.bucket import Bucket


class _Quantised(WithFeedback):
    """What the policies here share: a code for blocks, in both stages."""

    block: int
    rounds = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self, self.block)

    @property
    def code(self) -> Code:
        """How blocks are written."""
        raise NotImplementedError

    @property
    def deterministic(self) -> bool:
        return not self.code.random

    def compress(self, bucket: Bucket, state: State) -> Flow:
        return (yield from sharded_code(bucket, self.code, self.block)).aggregated


@dataclass(frozen=True)
class Int8(_Quantised):
    """Integers -127 to 127 times ``scale = max|block| / 127``.

    An element errs by at most half a step, ``max|block| / 254``, in either stage (a step if stochastic).
    On the wire: 8 bits per element and 4 bytes per block, 1.004 bytes per element at the default.

    Attributes:
        block: elements that share a scale; a power of two from 16 to 1024.
        rounding: to the nearest, or stochastic and so unbiased.
        ef: error feedback. Off by default: 8 bits train like 32 without (Dettmers 2016, section 3;
            Peng 2023, section 2.1, does so in 8-bit floats).
    """

    block: int = 1024
    rounding: Rounding = "nearest"
    ef: bool = False
    bytewise = True

    @property
    def code(self) -> Code:
        return Linear(127, self.rounding)


@dataclass(frozen=True)
class Int4(_Quantised):
    """Integers -7 to 7 times ``scale = max|block| / 7``; two share a byte.

    An element errs by at most half a step, ``max|block| / 14``, in either stage (a step if stochastic).
    On the wire: 4 bits per element and 4 bytes per block, 0.52 bytes per element at the default.

    Attributes:
        block: elements that share a scale; a power of two from 16 to 1024. Fewer than with 8 bits, as one large
            element costs its neighbours more.
        rounding: to the nearest, or stochastic and so unbiased.
        ef: error feedback. On by default: most elements of a block fall below half a step, are rounded to zero and
            would be so for ever (Seide 2014, section 2; Xie 2024, LoCo, section 3, for 4 bits).
    """

    block: int = 256
    rounding: Rounding = "nearest"
    ef: bool = True

    @property
    def code(self) -> Code:
        return Linear(7, self.rounding)


@dataclass(frozen=True)
class Fp8(_Quantised):
    """8-bit floats (Micikevicius 2022, table 1) times a scale that maps ``max|block|`` to the largest of them.

    ``e4m3``: 3 bits of fraction, so an element errs by 2**-4 of itself at most, down to 2**-15 of the block's
    largest; below, in even steps. ``e5m2``: 2 bits, 2**-3, down to 2**-30. (Twice that if stochastic.)
    On the wire: 8 bits per element and 4 bytes per block, 1.004 bytes per element at the default.

    Attributes:
        format: The paper gives gradients the range of ``e5m2``, with one scale per tensor; with one per block the
            range is there, and ``e4m3`` errs half as much.
        block: elements that share a scale; a power of two from 16 to 1024.
        rounding: to the nearest, or stochastic and so unbiased.
        ef: error feedback. Off by default, as with :class:`Int8`.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 1024
    rounding: Rounding = "nearest"
    ef: bool = False
    bytewise = True

    @property
    def code(self) -> Code:
        return Float8(self.format, self.rounding)
