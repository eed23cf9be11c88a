"""The controls of a policy that aggregates gradients, and what hooks of foreign data parallelism have in common."""

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
class Settings:
    """What users set of an aggregator before it exists."""

    weight: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False


class Controls:
    """What users set and read of a policy that aggregates."""

    policy: Policy
    _settings: Settings | Aggregator

    @property
    def weight(self) -> float | None:
        """This rank's weight: samples, tokens, trust. Read at the first gradient of a synchronizing backward; applies
        to all that was accumulated. The result is ``sum(w g) / sum(w)``; 0 excludes the rank."""
        return self._settings.weight

    @weight.setter
    def weight(self, value: float | None) -> None:
        self._settings.weight = None if value is None else float(value)

    @property
    def loss_scale(self) -> float:
        """GradScaler's scale: residuals are rescaled when it changes. Set it before backward."""
        return self._settings.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not value > 0 or value == float("inf"):
            raise ConfigurationError(f"loss_scale={value} must be positive and finite")
        self._settings.loss_scale = float(value)

    @property
    def skipped(self) -> bool:
        """Whether the weights of the last step added up to zero, so that nothing moves."""
        return self._settings.skipped

    def stats(self) -> dict[str, float]:
        """Figures of the last step: ``step``, ``collectives``, ``bytes_sent`` (by this rank, see
        :meth:`Collective.bytes_sent <hvdbridge.policy.collectives.Collective.bytes_sent>`), ``communication_seconds``,
        ``compression_seconds`` (in which the policy computed); ``state_bytes``, what the policy keeps on this rank;
        and whatever the policy reports of itself (its ``statistics(params, state)``).
        Waits for a step that runs in the background.

        Raises:
            StepError: a communication hook has seen no step.
        """
        return self._opened().stats()

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """The policy's state: plain dicts of tensors, readable with ``torch.load(weights_only=True)``. A synchronizer
        and a hook read each other's, where names and shapes are the same.

        ``gather=False``: this rank's. ``gather=True``: collective; complete on rank 0 of the group, empty elsewhere.
        Where replicas drift, ranks have parameters of their own between averages: save right after one, or save the
        parameters of all ranks.

        Raises:
            StepError: a communication hook has seen no step.
        """
        return checkpoint.state_dict(self._opened(), gather)

    def load_state_dict(self, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
        """Take up what :meth:`state_dict` gave, of either form; local, so call it on every rank. A communication hook
        that has seen no step keeps it until its first, and raises errors about names, shapes and ranks there.

        Args:
            saved: the state; parameters and optimizer are the user's to load.
            on_resize: what to do with a state of another number of ranks. ``"redistribute"``: what is local to ranks
                keeps its sum (needs a gathered state); ``"reset"``: it begins anew; ``"raise"``: an error. What is
                replicated is kept by either.

        Raises:
            ConfigurationError: the state is of another policy, other parameters or shapes, or of another number of
                ranks where that is refused; or it is not what :meth:`state_dict` gives. Nothing is loaded.
        """
        checkpoint.load_state_dict(self._opened(), saved, on_resize)

    def _opened(self) -> Aggregator:
        if not isinstance(self._settings, Aggregator):
            raise StepError("the communication hook has seen no step yet, so there is nothing to tell")
        return self._settings


class HookState(Controls):
    """The policy's state of one model, and the controls of a synchronizer.

    Attributes:
        policy: the policy.

    Raises:
        ConfigurationError: the policy acts after the optimizer's step, which a hook does not see.
    """

    def __init__(self, policy: Policy, weighted: bool | None = None, seed: int = 0) -> None:
        if acts_after_step(policy):
            raise ConfigurationError(
                f"{label(policy)} acts after the optimizer's step, of which a hook knows nothing. "
                "Use a GradientSynchronizer."
            )
        self.policy = policy
        self._weighted, self._seed = weighted, seed
        self._settings = Settings()
        self._aggregator: Aggregator | None = None
        self._context: ReductionContext | None = None
        self._saved: tuple[Mapping[str, Any], OnResize] | None = None

    def load_state_dict(self, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
        if self._aggregator is None:
            checkpoint.check_saved(saved, label(self.policy))
            self._saved = saved, on_resize
        else:
            super().load_state_dict(saved, on_resize)

    def close(self) -> None:
        """Free the channels; a later step fails. Harmless when repeated; ``hb.shutdown`` does it, too."""
        if self._context is not None:
            self._context.session.forget_at_shutdown(self.close)
            self._context.close()

    def _open(
        self, params: Mapping[str, Tensor], group: Any, device: torch.device, options: Mapping[str, object]
    ) -> None:
        """Collective over all ranks: channels of ``group``, whose ranks have equal ``params`` and ``options``."""
        session, settings = runtime.current(), self._settings
        self._context = context = ReductionContext.among(session, group, device)
        session.at_shutdown(self.close)
        given = {"policy": label(self.policy), "weighted": self._weighted, "seed": self._seed, **options}
        context.agree(self.policy, describe(Module(), params, given))
        self._aggregator = self._settings = aggregator = Aggregator(
            self.policy, params, context, self._seed, self._weighted
        )
        aggregator.weight = settings.weight
        aggregator.loss_scale = aggregator.state_scale = settings.loss_scale
        if self._saved is not None:
            checkpoint.load_state_dict(aggregator, *self._saved)
            self._saved = None


def join_torch() -> None:
    """Open a session on the ``torch.distributed`` that runs, unless one is open.

    Raises:
        ConfigurationError: it is not started.
    """
    if runtime.is_initialized():
        return
    if not dist.is_initialized():
        raise ConfigurationError("a communication hook needs torch.distributed, which nobody has started")
    runtime.init("torch", rank=dist.get_rank(), size=dist.get_world_size())
