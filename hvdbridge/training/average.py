"""The average of gradients that a script made by itself: one call, without a synchronizer."""

from __future__ import annotations

import itertools
from typing import Any

from torch.nn import Module

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Policy, acts_after_step
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.reduction.parameters import ignored, refuse_untouchable, trainable
from hvdbridge.reduction.reducer import Reducer, make_buckets
from hvdbridge.reduction.source import Options, aggregated, usual_bucket_mb
from hvdbridge.training import runtime
from hvdbridge.training.horovod_compression import has_leaves
from hvdbridge.training.synchronizer import device_of


def average_gradients(
    model: Module, group: Any = None, weight: float | None = None, policy: str | Policy = "mean"
) -> None:
    """Aggregate the gradients in ``p.grad`` in place: for loops that call it between backward and step.

    Args:
        model: its parameters that require gradients take part; one without a gradient counts as zeros.
        group: as for :class:`GradientSynchronizer`; all ranks of the job call this alike.
        weight: this rank's weight; all ranks give one, or none does.
        policy: one without state that does nothing after the optimizer's step.

    Raises:
        ConfigurationError: the policy has state, acts after the optimizer's step, or is not defined for so few ranks;
            ``HVDBRIDGE_BUCKET_MB=auto``.
        WeightError: a bad weight, or one on some ranks only.
    """
    session = runtime.current()
    chosen = from_spec(policy)
    params = trainable(model, ignored(model))
    refuse_untouchable(params)
    if has_leaves(chosen.init(params)):
        raise ConfigurationError(f"average_gradients: {label(chosen)} keeps state. Use a GradientSynchronizer.")
    if acts_after_step(chosen):
        raise ConfigurationError(
            f"average_gradients: {label(chosen)} acts after the optimizer's step. Use a GradientSynchronizer."
        )
    ranks = None if group is None else session.communicator.ranks_of(group)
    key = f"average_gradients {ranks} {device_of(params)}"
    if key not in session.opened:
        session.opened[key] = ReductionContext.among(session, group, device_of(params)), itertools.count()
    context, calls = session.opened[key]
    communicator = context.communicator
    usual = usual_bucket_mb(chosen, communicator.nodes, communicator.capabilities.blocks_host)
    bucket_mb = session.config.fixed_bucket_mb(usual, "average_gradients")
    chosen.check_size(communicator.size, len(set(communicator.nodes)) or None)
    aggregator = Aggregator(chosen, params, context)
    aggregator.weight = weight
    aggregator.step = aggregator.ended = next(calls)  # each call has random numbers of its own
    options = Options(bucket_mb, gradient_as_bucket_view=False, whole=chosen.scope == "step")
    Reducer(make_buckets(params, options), aggregator).finish()
    aggregated(set(params.values()))
