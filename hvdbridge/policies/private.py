"""Differential privacy: what the aggregate tells about any one rank is bounded.

Rules:

1. The unit of privacy is the rank, with all of its data; nothing is promised for a single sample of a rank.
2. Noise is drawn from entropy of the operating system, in every step anew: nothing is kept that could be shared,
   saved, copied to another process or guessed.
3. Arithmetic before the sum is local; the sum itself is one plain all-reduce.
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
from hvdbridge.policies.combining import participants, raw
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.policy.options import option


@dataclass(frozen=True)
class DifferentiallyPrivate(Policy):
    """Clip each rank's whole gradient, add Gaussian noise, take the mean (DP-FedSGD; McMahan 2018, algorithm 1, with
    the noise made by the ranks, as in Dwork 2006, "Our data, ourselves").

    With k ranks of positive weight each adds noise of standard deviation ``noise * norm / sqrt(k)`` to its
    ``g min(1, norm / |g|)``. The noise in the sum then has ``noise * norm`` in every element, whatever k is, and the
    update is the sum over k. A rank of weight 0 adds nothing, and the others add more.

    What is protected, and from whom:

    - The unit of privacy is the rank: with or without all that one rank ever contributes (its gradients replaced by
      zeros), what is seen has nearly the same distribution. Single samples of a rank have no guarantee of their own.
      Which ranks take part in a step, and k, are public.
    - The guarantee is for those who see updates or the model. Ranks among themselves see more: partial sums travel
      with a part of the noise, and c ranks that lie about theirs or tell it to others leave ``(k-c)/k`` of the
      variance.
    - Noise is made of floating-point numbers by a statistical generator (Philox), with a key from the operating system
      for every step: not by a cryptographic one, and without Mironov's (2012) snapping.

    - Nothing is promised about what others aggregate: the steps of a ``warmup`` before dp are not private. Nor would be
      the parts of a model that the other rules of a ``partition`` take, and so dp for a part is refused.

    A gradient that is not finite makes the update not finite on every rank, which tells that there was one. Unequal
    positive weights are refused: the bound on one rank's contribution would not hold. Gradients count as they arrive,
    so under a GradScaler ``norm`` is in units of its scale.

    On the wire: an all-reduce of the gradient, in its own type. It needs the whole gradient, so nothing travels while
    backward runs. Memory: its noise for a moment, the size of the whole gradient.

    Attributes:
        norm: the largest L2 norm of a rank's gradient, all parameters together.
        noise: the noise multiplier, the standard deviation of the sum's noise over ``norm``. 0: clips only.
        test_seed: for tests alone: noise that is a function of this number, the rank and the step, and so protects
            nothing. None: secret.

    Raises:
        ConfigurationError: it is to aggregate a part of the gradient, as within ``partition``.
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
        count, flat = len(participants(bucket)), raw(bucket)
        mine = flat
        if bucket.weight > 0:
            norm = global_norm(flat, bucket.layout)
            private = flat.to(torch.promote_types(flat.dtype, torch.float32))
            # in the type of the gradient: a tensor without dimensions does not widen it
            private.mul_((self.norm / norm).clamp(max=1.0))
            if self.noise:
                private.add_(self._normal(bucket, private), alpha=self.noise * self.norm / math.sqrt(count))
            # Rounding to a half type comes after the noise, so it cannot tell more than the noise lets through.
            mine = private.div_(count).to(flat.dtype)
        return Aggregated((yield AllReduce(mine)))

    def _normal(self, bucket: Bucket, like: Tensor) -> Tensor:
        """Standard normal numbers, those of this rank and step alone."""
        if self.test_seed is not None:
            keyed = replace(bucket, seed=self.test_seed)
            radius = uniform(keyed, "dp radius", private=True).neg_().log1p_().mul_(-2).sqrt_()
            return uniform(keyed, "dp angle", private=True).mul_(2 * math.pi).cos_().mul_(radius).to(like.dtype)
        if like.is_cuda:
            seed = int.from_bytes(os.urandom(8), "little")
            return torch.empty_like(like).normal_(generator=torch.Generator(like.device).manual_seed(seed))
        if like.is_meta:
            return torch.empty_like(like)
        # torch's CPU generator takes 32 bits of a seed, few enough to try them all; Philox takes 128.
        source = np.random.Generator(np.random.Philox(key=int.from_bytes(os.urandom(16), "little")))
        dtype = np.float64 if like.dtype == torch.float64 else np.float32
        return torch.from_numpy(source.standard_normal(like.numel(), dtype=dtype)).to(like.device)

    def epsilon(self, steps: int, delta: float) -> float:
        """The epsilon of ``steps`` steps at this ``delta``, for adding or removing one rank that takes part in each.

        A rank that is replaced by another instead has at most what twice the norm gives: half the ``noise``.
        Needs an accountant: dp-accounting (preferred) or Opacus.

        Raises:
            ImportError: neither is installed.
            ConfigurationError: steps < 0, or delta outside of (0, 1).
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
