"""average_gradients: aggregate gradients once, without a synchronizer."""

from __future__ import annotations

import itertools
from typing import Any

from torch.nn import Module

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Policy, acts_after_step
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.reduction.parameters import ignored_names, refuse_unsupported_tensors, trainable
from hvdbridge.reduction.reducer import Reducer, make_buckets
from hvdbridge.reduction.source import Options, default_bucket_mb, mark_aggregated
from hvdbridge.training import runtime
from hvdbridge.training.horovod_compression import has_leaves
from hvdbridge.training.synchronizer import device_of


def average_gradients(
    model: Module, group: Any = None, weight: float | None = None, policy: str | Policy = "mean"
) -> None:
    """Aggregate the gradients in ``p.grad`` in place. Collective; call it between backward and the optimizer's step.

    Args:
        model: the module whose parameters that require gradients take part. A missing gradient counts as zeros.
        group: as for :class:`GradientSynchronizer`; all ranks of the job call this, each with its own group.
        weight: this rank's weight; set on all ranks or on none.
        policy: a policy without state that does nothing after the optimizer's step.

    Raises:
        ConfigurationError: the policy has state, acts after the optimizer's step, or is not defined for this number of
            ranks; or ``HVDBRIDGE_BUCKET_MB=auto``.
        WeightError: a weight is invalid, or set on some ranks only.
    """
    session = runtime.current()
    chosen = from_spec(policy)
    params = trainable(model, ignored_names(model))
    refuse_unsupported_tensors(params)
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
    default = default_bucket_mb(chosen, communicator.nodes, communicator.capabilities.blocks_host)
    bucket_mb = session.config.fixed_bucket_mb(default, "average_gradients")
    chosen.check_size(communicator.size, len(set(communicator.nodes)) or None)
    aggregator = Aggregator(chosen, params, context)
    aggregator.weight = weight
    aggregator.step = aggregator.completed_steps = next(calls)  # the step number seeds random policies
    options = Options(bucket_mb, gradient_as_bucket_view=False, single_bucket=chosen.scope == "step")
    Reducer(make_buckets(params, options), aggregator).finish()
    mark_aggregated(set(params.values()))
