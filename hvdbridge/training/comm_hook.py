"""A policy as a communication hook of a DistributedDataParallel that somebody else has made.

Rules:

1. Nothing is started before the first bucket comes. What wraps DDP (Lightning, Accelerate) starts
   ``torch.distributed`` itself, after the user has named the hook. hvdbridge then joins what runs.
2. Without a model parameters are named by their position in it. The first step shows the positions: the hook holds its
   buckets until the last one comes. State then fits models that register the same parameters in the same order.
3. DDP calls hooks in bucket order, and a step ends with its backward. Where DDP calls hooks outside of a backward
   (``join()``), the next step's first bucket ends the step, or whatever asks the state for something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policies import from_spec
from hvdbridge.policy.base import Policy
from hvdbridge.policy.bucket import Layout, refuse_complex
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.autograd import at_end_of_backward, inside_backward
from hvdbridge.reduction.ddp import Layouts, Strided, future_of
from hvdbridge.reduction.parameters import ignored, trainable
from hvdbridge.training import runtime
from hvdbridge.training.hook_state import HookState, join_torch

Bucket = tuple[Sequence[Tensor], Tensor, "torch.futures.Future[Tensor]"]
"""Parameters, flat gradients, and the future of the update."""


class HookLayouts(Layouts):
    """Those of a model that the user names."""

    def look(self, parameters: Sequence[Tensor]) -> tuple[Layout, list[Strided]]:
        if unknown := [list(p.shape) for p in parameters if p not in self.names]:
            raise ConfigurationError(
                f"rank {runtime.rank()}: DDP's bucket has parameters of shapes {unknown} that the hook does not "
                "know. Give to_comm_hook the model that DDP wraps; one hook serves one model."
            )
        return super().look(parameters)


class CommHookState(HookState):
    """What :func:`to_comm_hook` gives as ``state``; see :class:`~hvdbridge.training.hook_state.HookState`."""

    def __init__(self, policy: Policy, model: Module | None, weighted: bool | None = None, seed: int = 0) -> None:
        super().__init__(policy, weighted, seed)
        self._model = model
        self._layouts = HookLayouts({})
        self._held: list[Bucket] = []
        self._running = self._outside = False  # a step is open; it began outside of a backward

    def bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The hook."""
        if bucket.index() == 0:
            self._end_shadow()
            self._outside = not inside_backward()
            if not self._outside:
                at_end_of_backward(self._finish)
            self._running = True
            if self._aggregator is None and self._model is not None:
                self._join_by_model(self._model)
            if self._aggregator is not None:
                self._aggregator.begin()
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise Unsupported("to_comm_hook: no policy takes sparse gradients. Use sparse=False in the Embedding.")
        future = future_of(buffer)
        self._held.append((bucket.parameters(), buffer, future))
        if self._aggregator is None and bucket.is_last():
            self._join_by_position().begin()
        if self._aggregator is not None:
            self._submit(self._aggregator, bucket.is_last())
        return future

    def _submit(self, aggregator: Aggregator, last: bool) -> None:
        held, self._held = self._held, []
        for i, (parameters, buffer, future) in enumerate(held, 1):
            piece = self._layouts.piece(parameters, buffer, future, aggregator.policy)
            aggregator.submit(piece, last and i == len(held))
        if last:  # where DDP waits within backward (static_graph, Join), nothing else flushes
            aggregator.scheduler.flush()
            if self._outside:
                aggregator.end_ahead()

    def _opened(self) -> Aggregator:
        self._end_shadow()
        return super()._opened()

    def close(self) -> None:
        if self._aggregator is not None and self._aggregator.scheduler.failure is None:
            self._end_shadow()
        super().close()

    def _end_shadow(self) -> None:
        """The last step within ``join()`` of a rank that had no more batches: no bucket follows that would end it."""
        if self._running and self._outside:
            self._finish()

    def _finish(self) -> None:
        self._running = False
        if self._aggregator is not None:
            self._aggregator.end()

    # -- the start ------------------------------------------------------------------------------------------------

    def _join_by_model(self, model: Any) -> None:
        group = None
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model, group = model.module, dist.get_process_group_ranks(model.process_group)
        self._join(trainable(model, ignored(model)), group)

    def _join_by_position(self) -> Aggregator:
        """The first step's buckets are DDP's from last to first, each in registered order."""
        found = [p for parameters, _, _ in reversed(self._held) for p in parameters]
        self._join({f"parameter.{i}": p for i, p in enumerate(found)}, None)
        return super()._opened()

    def _join(self, params: Mapping[str, Tensor], group: Any) -> None:
        join_torch()
        refuse_complex(params)
        self._layouts = HookLayouts({p: name for name, p in params.items()})
        self._open(params, group, next(iter(params.values())).device, {})


def to_comm_hook(
    policy: str | Policy, model: Module | None = None, weighted: bool | None = None, seed: int = 0
) -> tuple[CommHookState, Any]:
    """``(state, hook)`` for ``DistributedDataParallel.register_comm_hook(state, hook)``, and for all that call it.

    hvdbridge need not be initialized: the hook joins ``torch.distributed`` when the first bucket comes.

    Args:
        policy: a spec string or a policy.
        model: the module that DDP wraps, or the DDP: parameters have their names in it, and DDP's process group is
            the one that aggregates. None: names by position, and all ranks.
        weighted: True: exchange ``state.weight`` in every step; False: never; None: the first step decides.
        seed: of the randomness that all ranks share.

    Raises:
        SpecError: the policy does not parse.
        ConfigurationError: it acts after the optimizer's step.

    >>> state, hook = to_comm_hook("ef(bf16)")
    >>> state.weight is None
    True
    """
    state = CommHookState(from_spec(policy), model, weighted, seed)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations and names with its own
        return state.bucket(bucket)

    return state, hook
