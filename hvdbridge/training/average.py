"""The average of gradients that a script made by itself: one call, without a synchronizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Policy, acts_after_step
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.reduction.hooks import HookSource
from hvdbridge.reduction.parameters import ignored, refuse_meta, refuse_sharded, trainable
from hvdbridge.reduction.session import Session
from hvdbridge.reduction.source import Options, usual_bucket_mb
from hvdbridge.training import runtime
from hvdbridge.training.synchronizer import device_of


def average_gradients(
    model: Module, group: Any = None, weight: float | None = None, policy: str | Policy = "mean"
) -> None:
    """Aggregate what stands in ``p.grad`` now, in place: for loops that call it between backward and step.

    Args:
        model: its parameters that require gradients; one without a gradient counts as zeros.
        group: as for :class:`GradientSynchronizer`; all ranks of the job call this alike.
        weight: this rank's weight; all ranks give one, or none does.
        policy: one without state (there is nobody to keep it), and that does nothing after the optimizer's step.

    Raises:
        ConfigurationError: the policy has state, acts after the optimizer's step, or is not defined for so few ranks;
            ``HVDBRIDGE_BUCKET_MB=auto``.
        WeightError: a bad weight, or one on some ranks only.
    """
    session = runtime.current()
    chosen = from_spec(policy)
    params = trainable(model, ignored(model))
    refuse_sharded(params)
    refuse_meta(params)
    if has_leaves(chosen.init(params)):
        raise ConfigurationError(f"average_gradients: {label(chosen)} keeps state. Use a GradientSynchronizer.")
    if acts_after_step(chosen):
        raise ConfigurationError(
            f"average_gradients: {label(chosen)} acts after the optimizer's step. Use a GradientSynchronizer."
        )
    context, calls = averaging(session, group, device_of(params))
    communicator = context.communicator
    usual = usual_bucket_mb(chosen, communicator.nodes, communicator.capabilities.blocks_host)
    bucket_mb = session.config.fixed_bucket_mb(usual, "average_gradients")
    chosen.check_size(communicator.size, len(set(communicator.nodes)) or None)
    aggregator = Aggregator(chosen, params, communicator, context.control, context.scheduler)
    aggregator.weight = weight
    aggregator.step = next(calls)  # random policies throw other dice in each
    aggregator.ended = aggregator.step  # this process has made as many, with aggregators of their own
    options = Options(bucket_mb, gradient_as_bucket_view=False, whole=chosen.scope == "step")
    HookSource(params, aggregator, options, hooked=()).run()


def averaging(
    session: Session, group: Any, device: torch.device
) -> tuple[ReductionContext, Iterator[int]]:
    """The context of :func:`average_gradients` for one group, which lives as long as the session; and the number of
    its next call."""
    ranks = None if group is None else session.communicator.ranks_of(group)
    key = f"average_gradients {ranks} {device}"
    if key not in session.opened:
        session.opened[key] = ReductionContext.among(session, group, device), itertools.count()
    opened: tuple[ReductionContext, Iterator[int]] = session.opened[key]
    return opened


def has_leaves(state: Mapping[str, Any]) -> bool:
    """Whether a tree of state holds any tensor."""
    return any(has_leaves(v) if isinstance(v, Mapping) else True for v in state.values())
