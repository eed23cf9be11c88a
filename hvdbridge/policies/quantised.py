"""int8, int4, fp8: values quantised in blocks, each with its own scale (Dettmers 2022, section 2.1).

Rules:

1. The policies use the sharded scheme (:func:`~hvdbridge.policies.sharded.sharded_code`): every rank sends its
   quantised shares to their owners. These add them in float32 in rank order, quantise the sum, and send it to all
   ranks.
2. Blocks start at each parameter, so the result does not depend on bucket boundaries.
3. A block that contains NaN or inf becomes non-finite as a whole, on every rank.
4. ``rounding="nearest"`` has the smallest error per step, but repeats it in every step; ``"stochastic"`` is unbiased.
   Its noise is private to each rank in the first stage, and the owner's in the second.
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
    """Base of these policies: one code for blocks, in both stages."""

    block: int
    rounds = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self, self.block)

    @property
    def code(self) -> Code:
        """The code of the blocks."""
        raise NotImplementedError

    @property
    def deterministic(self) -> bool:
        return not self.code.random

    def compress(self, bucket: Bucket, state: State) -> Flow:
        return (yield from sharded_code(bucket, self.code, self.block)).aggregated


@dataclass(frozen=True)
class Int8(_Quantised):
    """Integers -127 to 127 times ``scale = max|block| / 127``.

    The error of an element is at most half a step, ``max|block| / 254``, in either stage (a step if stochastic).
    On the wire: 8 bits per element and 4 bytes per block, 1.004 bytes per element at the default.

    Source:
        Dettmers, *8-bit approximations for parallelism in deep learning*, 2016; scales per block as in Dettmers et al.,
        *8-bit optimizers via block-wise quantization*, 2022, section 2.1.

    When to choose:
        A quarter of the bytes is needed, and memory for a residual is not available.

    Attributes:
        block: number of elements that share a scale; a power of two from 16 to 1024.
        rounding: to the nearest, or stochastic and so unbiased.
        ef: error feedback. Off by default, as training with 8 bits matches 32 bits without it (Dettmers 2016, section
            3; in 8-bit floats Peng 2023, section 2.1).
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

    The error of an element is at most half a step, ``max|block| / 14``, in either stage (a step if stochastic).
    On the wire: 4 bits per element and 4 bytes per block, 0.52 bytes per element at the default.

    Source:
        Dettmers et al., *8-bit optimizers via block-wise quantization*, 2022, section 2.1, with 4 bits; error feedback
        as in Seide et al., *1-bit stochastic gradient descent*, 2014, section 2.

    When to choose:
        An eighth of the bytes is needed, and each rank has memory for a residual.

    Attributes:
        block: number of elements that share a scale; a power of two from 16 to 1024. Blocks are shorter than with 8
            bits, as one large element costs the others more precision.
        rounding: to the nearest, or stochastic and so unbiased.
        ef: error feedback. On by default: most elements of a block are below half a step, and without it would be
            rounded to zero in every step (Seide 2014, section 2; Xie 2024, LoCo, section 3, for 4 bits).
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

    ``e4m3``: 3 bits of fraction, so the error is at most 2**-4 of an element, down to 2**-15 of the block's largest.
    Below that, steps are even. ``e5m2``: 2 bits, 2**-3, down to 2**-30. (Twice the error if stochastic.)
    On the wire: 8 bits per element and 4 bytes per block, 1.004 bytes per element at the default.

    Source:
        Micikevicius et al., *FP8 formats for deep learning*, 2022, table 1.

    When to choose:
        A quarter of the bytes is needed, and small elements of a block need more precision than large ones.

    Attributes:
        format: The paper uses ``e5m2`` for gradients, for its range, with one scale per tensor. One scale per block
            provides the range, and ``e4m3`` has half the error.
        block: number of elements that share a scale; a power of two from 16 to 1024.
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
