"""Differential privacy: a bound on the information about any one rank in the aggregate.

Rules:

1. The unit of privacy is the rank, with all of its data. There is no guarantee for a single sample of a rank.
2. Each step seeds its noise from the operating system's entropy. No seed is kept, so none can be shared, saved,
   copied to another process or guessed.
3. All arithmetic before the sum is local. The sum is one plain all-reduce.
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.norm import global_norm
from hvdbridge.kernels.random import uniform
from hvdbridge.policies.combining import participants, raw_gradient
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.policy.options import option


@dataclass(frozen=True)
class DifferentiallyPrivate(Policy):
    """Mean of clipped gradients with Gaussian noise (DP-FedSGD; McMahan 2018, algorithm 1).

    ``u = sum_r (g_r min(1, norm / |g_r|) + n_r) / k`` over the k ranks of positive weight. Each of them adds its own
    noise n_r of standard deviation ``noise * norm / sqrt(k)`` (as in Dwork 2006, "Our data, ourselves"). Each element
    of the sum then has noise of standard deviation ``noise * norm``, for any k. A rank of weight 0 adds nothing.

    Scope of the guarantee:

    - The unit of privacy is the rank. Updates have nearly the same distribution with and without all contributions of
      one rank (its gradients replaced by zeros). Single samples of a rank have no guarantee of their own. It is public
      which ranks, and how many, take part in a step.
    - The guarantee holds towards observers of the updates or the model. Ranks observe more of each other, since partial
      sums contain a part of the noise. If c ranks omit or disclose their noise, ``(k-c)/k`` of its variance remains.
    - The noise is floating-point numbers from a statistical generator (Philox), with a new key from the operating
      system in each step. The generator is not cryptographic, and Mironov's (2012) snapping is not applied.
    - Other policies have no guarantee: the steps of a ``warmup`` before dp are not private. Neither would be the other
      parts of the model within a ``partition``, so dp for a part of the gradient raises an error.

    A gradient that is not finite makes the update not finite on all ranks, which discloses that it occurred. Unequal
    positive weights raise :class:`~hvdbridge.WeightError`, as one rank's contribution would exceed its bound. Gradients
    are clipped as they arrive, so under a GradScaler ``norm`` is in units of the scaled gradient.

    State: none. On the wire: an all-reduce of the gradient, in its own type. Aggregation needs the whole gradient, so
    nothing is sent during backward. Memory: temporarily noise of the size of the whole gradient.

    Source:
        McMahan et al., *Learning differentially private recurrent language models*, 2018, algorithm 1.

    When to choose:
        The updates must not disclose what one rank contributed.

    Attributes:
        norm: largest L2 norm of a rank's gradient, over all parameters together.
        noise: noise multiplier: standard deviation of the sum's noise divided by ``norm``. 0: clip only.
        test_seed: for tests only: makes the noise a function of this number, the rank and the step, and so gives no
            privacy. None: secret noise.

    Raises:
        ConfigurationError: a bucket holds a part of the gradient, as within ``partition``; or an option is not finite.
    """

    norm: float = option(1.0, above=0)
    noise: float = option(1.0, at_least=0)
    test_seed: int | None = None
    scope = "step"
    deterministic = False
    unequal_weights = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.norm) and math.isfinite(self.noise)):
            raise ConfigurationError(f"DifferentiallyPrivate: norm={self.norm}, noise={self.noise} must be finite")

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if set(bucket.layout.blocks) != set(bucket.layout.names):
            held, all_names = len(bucket.layout.names), len(bucket.layout.blocks)
            raise ConfigurationError(
                f"dp bounds the whole gradient; this bucket holds a part of it ({held} of {all_names} parameters). "
                "It cannot stand within partition(...): the other parts would tell what it hides."
            )
        count, flat = len(participants(bucket)), raw_gradient(bucket)
        contribution = flat
        if not bucket.excluded:
            norm = global_norm(flat, bucket.layout)
            clipped = flat.to(torch.promote_types(flat.dtype, torch.float32))
            # The factor is float64, but a tensor without dimensions does not widen the type of the gradient.
            clipped.mul_((self.norm / norm).clamp(max=1.0))
            if self.noise:
                bucket.decide(lambda step, _: int(step))  # each step has noise of its own: a replay would repeat it
                clipped.add_(self._normal(bucket, clipped), alpha=self.noise * self.norm / math.sqrt(count))
            # Rounding to a half type comes after the noise, so it discloses nothing that the noise hides.
            contribution = clipped.div_(count).to(flat.dtype)
        return Aggregated((yield AllReduce(contribution)))

    def _normal(self, bucket: Bucket, like: Tensor) -> Tensor:
        """Return standard normal numbers of the shape of ``like``, drawn for this rank and step only."""
        if self.test_seed is not None:
            keyed = replace(bucket, seed=self.test_seed)
            radius = uniform(keyed, "dp radius", private=True).neg_().log1p_().mul_(-2).sqrt_()
            return uniform(keyed, "dp angle", private=True).mul_(2 * math.pi).cos_().mul_(radius).to(like.dtype)
        if like.is_cuda:
            seed = int.from_bytes(os.urandom(8), "little")
            return torch.empty_like(like).normal_(generator=torch.Generator(like.device).manual_seed(seed))
        if like.is_meta:
            return torch.empty_like(like)
        # torch's CPU generator uses 32 bits of a seed, few enough to try them all; Philox uses 128.
        source = np.random.Generator(np.random.Philox(key=int.from_bytes(os.urandom(16), "little")))
        dtype = np.float64 if like.dtype == torch.float64 else np.float32
        return torch.from_numpy(source.standard_normal(like.numel(), dtype=dtype)).to(like.device)

    def epsilon(self, steps: int, delta: float) -> float:
        """Return the epsilon of ``steps`` steps at ``delta``, for adding or removing one rank that takes part in all.

        For replacing one rank by another, the bound is the epsilon of twice the norm, that is of half the ``noise``.
        An accountant computes the value: dp-accounting (preferred) or Opacus.

        Raises:
            ImportError: neither accountant is installed.
            ConfigurationError: ``steps`` < 0, or ``delta`` outside of (0, 1).
        """
        if steps < 0 or not 0 < delta < 1:
            raise ConfigurationError(f"epsilon needs steps >= 0 and 0 < delta < 1, got steps={steps}, delta={delta}")
        if steps == 0:
            return 0.0
        if self.noise == 0:
            return math.inf
        for account in (_dp_accounting, _opacus):
            try:
                return account(self.noise, steps, delta)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in ("dp_accounting", "opacus"):
                    raise
        raise ImportError("epsilon needs an accountant. Run: pip install dp-accounting   (or: pip install opacus)")


def _dp_accounting(noise: float, steps: int, delta: float) -> float:
    package = importlib.import_module("dp_accounting")
    accountant = importlib.import_module("dp_accounting.pld").PLDAccountant()
    accountant.compose(package.GaussianDpEvent(noise), steps)
    return float(accountant.get_epsilon(delta))


def _opacus(noise: float, steps: int, delta: float) -> float:
    accountant = importlib.import_module("opacus.accountants").RDPAccountant()
    accountant.history.append((noise, 1.0, steps))
    return float(accountant.get_epsilon(delta=delta))
