"""Controls of a policy that aggregates gradients, and the base class of the state of DDP and FSDP hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from hvdbridge.errors import ConfigurationError, StepError
from hvdbridge.execution.state_store import OnResize
from hvdbridge.policies import label
from hvdbridge.policy.base import Policy, acts_after_step
from hvdbridge.reduction import checkpoint
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.context import ReductionContext, describe
from hvdbridge.training import runtime


@dataclass
class PendingSettings:
    """Values that the user sets before the aggregator exists."""

    weight: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False


class Controls:
    """The interface that a synchronizer and a hook's state share: weights, statistics, saved state."""

    policy: Policy
    _settings: PendingSettings | Aggregator

    @property
    def weight(self) -> float | None:
        """This rank's weight ``w``, such as a number of samples. The result is ``sum(w g) / sum(w)``; 0 excludes the
        rank. It is read at the first gradient of a synchronizing backward, for all accumulated gradients."""
        return self._settings.weight

    @weight.setter
    def weight(self, value: float | None) -> None:
        self._settings.weight = None if value is None else float(value)

    @property
    def loss_scale(self) -> float:
        """The scale of ``torch.amp.GradScaler``. Set it before backward; residuals are rescaled when it changes."""
        return self._settings.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not value > 0 or value == float("inf"):
            raise ConfigurationError(f"loss_scale={value} must be positive and finite")
        self._settings.loss_scale = float(value)

    @property
    def skipped(self) -> bool:
        """Whether the last step's weights summed to zero. Then nothing is aggregated; gradients are zeros or None."""
        return self._settings.skipped

    def stats(self) -> dict[str, float]:
        """Return statistics of the last step, after waiting for a step that still runs in the background.

        Keys: ``step``; ``collectives``; ``bytes_sent`` by this rank (see
        :meth:`Collective.bytes_sent <hvdbridge.policy.collectives.Collective.bytes_sent>`); ``communication_seconds``;
        ``compression_seconds``, the policy's computation; ``state_bytes``, the size of the policy's state on this rank;
        and the figures that the policy itself reports (its ``statistics(params, state)``).

        Raises:
            StepError: a communication hook has not run a step yet.
        """
        return self._require_aggregator().stats()

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Return the policy's state as nested dicts of tensors, which ``torch.load(weights_only=True)`` can read.

        A synchronizer and a hook can load each other's state if names and shapes are equal. With policies that let
        replicas drift (local SGD), save right after an average, or save the parameters of all ranks.

        Args:
            gather: False: this rank's state. True (collective): the state of all ranks on rank 0 of the group, and an
                empty dict on the others.

        Raises:
            StepError: a communication hook has not run a step yet.
        """
        return checkpoint.state_dict(self._require_aggregator(), gather)

    def load_state_dict(self, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
        """Load a state that :meth:`state_dict` returned, in either form. The call is local: make it on every rank.

        A communication hook that has not run a step yet loads the state in its first step, and raises errors about
        names, shapes and ranks there.

        Args:
            saved: the policy's state. The user loads parameters and optimizer separately.
            on_resize: how to load a state of another number of ranks. ``"redistribute"``: rank-local state keeps its
                sum over ranks (needs a gathered state); ``"reset"``: rank-local state is initialized again;
                ``"raise"``: raise ConfigurationError. The first two keep replicated state.

        Raises:
            ConfigurationError: the state belongs to another policy, other parameters or shapes, or a number of ranks
                that ``on_resize`` does not allow; or :meth:`state_dict` did not return it. Nothing is loaded then.
        """
        checkpoint.load_state_dict(self._require_aggregator(), saved, on_resize)

    def _require_aggregator(self) -> Aggregator:
        if not isinstance(self._settings, Aggregator):
            raise StepError("the communication hook has seen no step yet, so there is nothing to tell")
        return self._settings


class HookState(Controls):
    """The state of a communication hook: a policy's state for one model, with a synchronizer's controls.

    Attributes:
        policy: the policy.

    Raises:
        ConfigurationError: the policy acts after the optimizer's step, and no hook is called there.
    """

    def __init__(self, policy: Policy, weighted: bool | None = None, seed: int = 0) -> None:
        if acts_after_step(policy):
            raise ConfigurationError(
                f"{label(policy)} acts after the optimizer's step, of which a hook knows nothing. "
                "Use a GradientSynchronizer."
            )
        self.policy = policy
        self._weighted, self._seed = weighted, seed
        self._settings = PendingSettings()
        self._aggregator: Aggregator | None = None
        self._context: ReductionContext | None = None
        self._state_to_load: tuple[Mapping[str, Any], OnResize] | None = None

    def load_state_dict(self, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
        if self._aggregator is None:
            checkpoint.check_saved(saved, label(self.policy))
            self._state_to_load = saved, on_resize
        else:
            super().load_state_dict(saved, on_resize)

    def close(self) -> None:
        """Close the channels; a later step fails. Further calls have no effect. ``hb.shutdown`` calls it, too."""
        if self._context is not None:
            self._context.session.forget_at_shutdown(self.close)
            self._context.close()

    def _create_aggregator(
        self, params: Mapping[str, Tensor], group: Any, device: torch.device, options: Mapping[str, object]
    ) -> None:
        """Open channels among ``group``, compare ``params`` and ``options`` over its ranks, and make the aggregator.

        Collective over all ranks of the job.
        """
        session, settings = runtime.current(), self._settings
        self._context = context = ReductionContext.among(session, group, device)
        session.at_shutdown(self.close)
        described = {"policy": label(self.policy), "weighted": self._weighted, "seed": self._seed, **options}
        context.agree(self.policy, describe(Module(), params, described))
        self._aggregator = self._settings = aggregator = Aggregator(
            self.policy, params, context, self._seed, self._weighted
        )
        aggregator.weight = settings.weight
        aggregator.loss_scale = aggregator.state_scale = settings.loss_scale
        if self._state_to_load is not None:
            checkpoint.load_state_dict(aggregator, *self._state_to_load)
            self._state_to_load = None


def join_torch() -> None:
    """Initialize hvdbridge on the running ``torch.distributed``, unless hvdbridge is initialized.

    Raises:
        ConfigurationError: torch.distributed is not initialized.
    """
    if runtime.is_initialized():
        return
    if not dist.is_initialized():
        raise ConfigurationError("a communication hook needs torch.distributed, which is not started")
    runtime.init("torch", rank=dist.get_rank(), size=dist.get_world_size())
