"""What hooks of somebody else's data parallelism have in common: an aggregator, and a synchronizer's controls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdbridge.errors import ConfigurationError, StepError
from hvdbridge.execution.state_store import OnResize
from hvdbridge.policies import label
from hvdbridge.policy.base import Policy, acts_after_step
from hvdbridge.reduction import checkpoint
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.agreement import agree, describe, open_group
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.training import runtime


class HookState:
    """The policy's state of one model, and the controls of a synchronizer.

    Attributes:
        policy: the policy.
        weight: this rank's weight of the next step; all ranks set one, or none does.

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
        self.weight: float | None = None
        self._weighted, self._seed = weighted, seed
        self._aggregator: Aggregator | None = None
        self._saved: tuple[Mapping[str, Any], OnResize] | None = None
        self._loss_scale = 1.0
        self._context: ReductionContext | None = None

    @property
    def loss_scale(self) -> float:
        """GradScaler's scale: residuals are rescaled when it changes. Set it before backward."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not value > 0 or value == float("inf"):
            raise ConfigurationError(f"loss_scale={value} must be positive and finite")
        self._loss_scale = float(value)
        if self._aggregator is not None:
            self._aggregator.loss_scale = self._loss_scale

    @property
    def skipped(self) -> bool:
        """Whether the weights of the last step added up to zero: gradients are zeros."""
        return self._aggregator is not None and self._aggregator.skipped

    def stats(self) -> dict[str, float]:
        """Figures of the last step, as of ``GradientSynchronizer.stats``.

        Raises:
            StepError: no step has been made.
        """
        return self._opened().stats()

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """What ``GradientSynchronizer.state_dict`` gives; either reads the other's where names and shapes are the same.

        Raises:
            StepError: no step has been made.
        """
        return checkpoint.state_dict(self._opened(), gather)

    def load_state_dict(self, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
        """Take up what :meth:`state_dict` gave, as ``GradientSynchronizer.load_state_dict`` does. Before the first step
        it is kept until that begins, and errors about names, shapes and the number of ranks come there.

        Raises:
            ConfigurationError: the state is of another policy, other parameters or shapes, or of another number of
                ranks where that is refused; or it is not what :meth:`state_dict` gives.
        """
        if self._aggregator is None:
            checkpoint.check_saved(saved, label(self.policy))
            self._saved = saved, on_resize
        else:
            self._load(self._opened(), saved, on_resize)

    def close(self) -> None:
        """Free the channels; a later step fails. Harmless when repeated; ``hb.shutdown`` does it, too."""
        if self._context is not None:
            self._context.session.forget_at_shutdown(self.close)
            self._context.close()

    def _opened(self) -> Aggregator:
        if self._aggregator is None:
            raise StepError("the communication hook has seen no step yet, so there is nothing to tell")
        return self._aggregator

    def _load(self, aggregator: Aggregator, saved: Mapping[str, Any], on_resize: OnResize) -> None:
        checkpoint.load_state_dict(aggregator, saved, on_resize)
        self._loss_scale = aggregator.loss_scale

    def _begin(self, aggregator: Aggregator) -> None:
        aggregator.weight = None if self.weight is None else float(self.weight)
        aggregator.begin()

    def _open(
        self, params: Mapping[str, Tensor], group: Any, device: torch.device, options: Mapping[str, object]
    ) -> None:
        """Collective over all ranks: channels of ``group``, whose ranks have equal ``params`` and ``options``."""
        session = runtime.current()
        communicator, control, ranks = open_group(session.communicator, group)
        given = {"policy": label(self.policy), "weighted": self._weighted, "seed": self._seed, **options}
        agree(control, describe(torch.nn.Module(), params, given))
        self.policy.check_size(communicator.size, len(set(communicator.nodes)) or None)
        self._context = ReductionContext(session, (communicator, control), device, session.check(ranks))
        session.at_shutdown(self.close)
        self._aggregator = Aggregator(
            self.policy, params, communicator, control, self._context.scheduler, self._seed, self._weighted
        )
        self._aggregator.loss_scale = self._aggregator._held_scale = self._loss_scale
        if self._saved is not None:
            (saved, on_resize), self._saved = self._saved, None
            self._load(self._aggregator, saved, on_resize)


def join_torch() -> None:
    """Open a session on the ``torch.distributed`` that runs, unless one is open.

    Raises:
        ConfigurationError: nobody has started it.
    """
    if runtime.is_initialized():
        return
    if not dist.is_initialized():
        raise ConfigurationError("a communication hook needs torch.distributed, which nobody has started")
    runtime.init("torch", rank=dist.get_rank(), size=dist.get_world_size())
