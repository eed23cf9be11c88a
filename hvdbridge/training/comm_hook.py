"""Run a policy as a communication hook of the user's or a framework's DistributedDataParallel.

Rules:

1. hvdbridge is initialized at the first bucket, on the running ``torch.distributed``. Frameworks that wrap DDP
   (Lightning, Accelerate) initialize ``torch.distributed`` themselves, after the user has passed the hook to them.
2. Without a model, a parameter's name is its position. The positions follow from all buckets of the first step, so the
   hook holds them until the last one. State then fits models that register the same parameters in the same order.
3. DDP calls the hook in bucket order, and a step ends with its backward. In ``join()``, DDP calls the hook outside of
   a backward. Then the next step's first bucket ends the step, or any call that needs the aggregator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policies import from_spec, label
from hvdbridge.policies.wrappers import unmatched_patterns
from hvdbridge.policy.base import Policy, refuse_complex
from hvdbridge.policy.bucket import Layout
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.autograd import at_end_of_backward, inside_backward
from hvdbridge.reduction.ddp import BucketLayouts, Strided, bucket_future
from hvdbridge.reduction.parameters import ignored_names, trainable
from hvdbridge.training import runtime
from hvdbridge.training.hook_state import HookState, join_torch

HeldBucket = tuple[Sequence[Tensor], Tensor, "torch.futures.Future[Tensor]"]
"""Parameters, their flat gradients, and the future of the update."""


class HookLayouts(BucketLayouts):
    """The layouts of DDP's buckets of one model; parameters of another model raise ConfigurationError."""

    def make_layout(self, parameters: Sequence[Tensor]) -> tuple[Layout, list[Strided]]:
        if unknown := [list(p.shape) for p in parameters if p not in self.names]:
            raise ConfigurationError(
                f"rank {runtime.rank()}: DDP's bucket has parameters of shapes {unknown} that the hook does not "
                "know. Give to_comm_hook the model that DDP wraps; one hook serves one model."
            )
        return super().make_layout(parameters)


class CommHookState(HookState):
    """The ``state`` that :func:`to_comm_hook` returns; see :class:`~hvdbridge.training.hook_state.HookState`."""

    def __init__(self, policy: Policy, model: Module | None, weighted: bool | None = None, seed: int = 0) -> None:
        super().__init__(policy, weighted, seed)
        self._model = model
        self._layouts = HookLayouts({})
        self._held_buckets: list[HeldBucket] = []
        self._step_open = self._outside_backward = False  # a step is open, and it began outside of a backward

    def bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Submit a bucket of DDP, a ``GradBucket``, and return the future of its update: the hook itself."""
        if bucket.index() == 0:
            self._end_join_step()
            self._outside_backward = not inside_backward()
            if not self._outside_backward:
                at_end_of_backward(self._end_step)
            self._step_open = True
            if self._aggregator is None and self._model is not None:
                self._start_with_model(self._model)
            if self._aggregator is not None:
                self._aggregator.begin()
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise Unsupported("to_comm_hook: no policy takes sparse gradients. Use sparse=False in the Embedding.")
        future = bucket_future(buffer)
        self._held_buckets.append((bucket.parameters(), buffer, future))
        if self._aggregator is None and bucket.is_last():
            self._start_by_position().begin()
        if self._aggregator is not None:
            self._submit(self._aggregator, bucket.is_last())
        return future

    def _submit(self, aggregator: Aggregator, last: bool) -> None:
        held, self._held_buckets = self._held_buckets, []
        for i, (parameters, buffer, future) in enumerate(held, 1):
            bucket = self._layouts.bucket(parameters, buffer, future, aggregator.policy)
            aggregator.submit(bucket, last and i == len(held))
        if last:  # with static_graph or Join, DDP waits for the futures before anything else flushes
            aggregator.scheduler.flush()
            if self._outside_backward:
                aggregator.end_ahead()

    def _require_aggregator(self) -> Aggregator:
        self._end_join_step()
        return super()._require_aggregator()

    def close(self) -> None:
        if self._aggregator is not None and self._aggregator.scheduler.failure is None:
            self._end_join_step()
        super().close()

    def _end_join_step(self) -> None:
        """End a step that began in ``join()``, on a rank without more batches, if it is open: no backward ends it."""
        if self._step_open and self._outside_backward:
            self._end_step()

    def _end_step(self) -> None:
        self._step_open = False
        if self._aggregator is not None:
            self._aggregator.end()

    # -- the start ------------------------------------------------------------------------------------------------

    def _start_with_model(self, model: Any) -> None:
        group = None
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model, group = model.module, dist.get_process_group_ranks(model.process_group)
        self._start(trainable(model, ignored_names(model)), group)

    def _start_by_position(self) -> Aggregator:
        """Name the parameters by position: DDP's first buckets are in reverse order, each in registered order."""
        registered = [p for parameters, _, _ in reversed(self._held_buckets) for p in parameters]
        params = {f"parameter.{i}": p for i, p in enumerate(registered)}
        if unmatched := unmatched_patterns(self.policy, params):
            raise ConfigurationError(
                f"{label(self.policy)}: no parameter matches {', '.join(unmatched)}, because to_comm_hook without a "
                "model names parameters by position (parameter.0, parameter.1, ...). Use to_comm_hook(policy, model)."
            )
        self._start(params, None)
        return super()._require_aggregator()

    def _start(self, params: Mapping[str, Tensor], group: Any) -> None:
        join_torch()
        refuse_complex(params)
        self._layouts = HookLayouts({p: name for name, p in params.items()})
        self._create_aggregator(params, group, next(iter(params.values())).device, {})


def to_comm_hook(
    policy: str | Policy, model: Module | None = None, weighted: bool | None = None, seed: int = 0
) -> tuple[CommHookState, Any]:
    """Return ``(state, hook)`` for ``DistributedDataParallel.register_comm_hook(state, hook)``.

    hvdbridge need not be initialized: the first bucket initializes it on the running ``torch.distributed``.

    Args:
        policy: a spec string or a policy.
        model: the module that DDP wraps, or the DDP module itself; it defines the names of parameters. A DDP module's
            process group is the one that aggregates. None: parameters are named by position (``parameter.0``), and all
            ranks aggregate. Patterns of names in ``partition`` then raise ConfigurationError in the first step.
        weighted: True: exchange ``state.weight`` in every step; False: never; None: the first step decides.
        seed: the seed of the random numbers that all ranks share.

    Raises:
        SpecError: the spec string is invalid.
        ConfigurationError: the policy acts after the optimizer's step.

    >>> state, hook = to_comm_hook("ef(bf16)")
    >>> state.weight is None
    True
    """
    state = CommHookState(from_spec(policy), model, weighted, seed)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares names and annotations with its own
        return state.bucket(bucket)

    return state, hook
