"""The state of the policy of a ``hvd.DistributedOptimizer`` in checkpoints.

It is apart from the optimizer's state, because it differs between ranks. It belongs to the reducer, so a loaded state
waits until the first step opens the reducer's channel.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hvdbridge.execution.state_store import OnResize
from hvdbridge.policies import label
from hvdbridge.reduction import checkpoint
from hvdbridge.torch.optimizer_options import Settings
from hvdbridge.torch.optimizer_reducer import OptimizerReducer, internal_errors


class SavesPolicyState(Optimizer):
    """An optimizer whose reducer has a policy with state."""

    _settings: Settings
    _has_gradients: bool
    _loaded: tuple[Mapping[str, Any], OnResize] | None = None  # a policy's state, for the next reducer
    _saves_policy_state = False  # or has warned that the script does not

    def _usable_reducer(self) -> OptimizerReducer | None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's state, without the policy's. Warn once if the policy has a state to save."""
        reducer = self._usable_reducer()
        if not self._saves_policy_state and reducer is not None and reducer.aggregator.store.nbytes:
            self._saves_policy_state = True
            logging.getLogger("hvdbridge").warning(
                "optimizer.state_dict() lacks the state of the policy %r, so a resumed training differs: also save "
                "optimizer.policy_state_dict(gather=True), which all ranks call, and load it by "
                "load_policy_state_dict()",
                label(self._settings.policy),
            )
        return super().state_dict()

    def policy_state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Return the policy's state after a step, for a checkpoint; ``torch.load(weights_only=True)`` can read it.

        It is empty before the first step, and if this rank reduces nothing. Without a policy it holds no tensors.

        Args:
            gather: False: this rank's state. True (collective): the state of all ranks on rank 0 of the process set,
                and an empty dict on the others.
        """
        self._saves_policy_state = True
        reducer = self._usable_reducer()
        if reducer is None:
            return {}
        with internal_errors():
            return checkpoint.state_dict(reducer.aggregator, gather)

    def load_policy_state_dict(self, saved: Mapping[str, Any], on_resize: OnResize = "redistribute") -> None:
        """Load what :meth:`policy_state_dict` returned, in either form. Local: call it on every rank.

        Before the first step, that step loads the state, and raises errors about names, shapes and ranks.

        Args:
            saved: the policy's state. The user loads parameters and optimizer separately.
            on_resize: how to load a state of another number of ranks, see ``GradientSynchronizer.load_state_dict``.

        Raises:
            ConfigurationError: ``saved`` is of another policy, other parameters or shapes, or of a number of ranks that
                ``on_resize`` does not allow; or :meth:`policy_state_dict` did not return it. Nothing is loaded then.
            AssertionError: called between ``backward()`` and ``step()`` or ``synchronize()``.
        """
        if self._has_gradients:
            raise AssertionError("load_policy_state_dict() between backward() and step(): call it before backward()")
        checkpoint.check_saved(saved, label(self._settings.policy))
        self._saves_policy_state = True
        reducer = self._usable_reducer()
        if reducer is None:
            self._loaded = saved, on_resize
        else:
            checkpoint.load_state_dict(reducer.aggregator, saved, on_resize)
