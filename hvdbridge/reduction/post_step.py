"""AfterStep: runs a policy's ``after_step`` on the parameters, after the optimizers have stepped.

Rules:

1. At the end of a backward its step is recorded as due, if the policy has work after it.
2. The work runs per optimizer, over the parameters of this optimizer, in a step post-hook. The order of optimizers is
   that of the synchronizer's list on all ranks: after an early step, the work waits for the optimizers before it.
3. A rank may skip an optimizer's step alone: policies whose ``replicas`` drift keep gradients local, and GradScaler
   skips the step of a rank with an overflow. The work then runs before the parameters are used: in the next forward
   that records gradients, or when the next backward begins. So no rank waits for ever.
4. Within ``step(closure)`` the work waits for the end of the step, whatever the closure does.
5. A policy's anchors are the parameters at the first backward, because weights may be loaded after the synchronizer was
   constructed. They must be equal on every rank.
6. Hooks are registered when a step is due for the first time, because most policies have no such work.
7. Parameters added to an optimizer later take part from the next backward on, which follows the same step on all ranks.
   Their anchors are their values before that optimizer's next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hvdbridge.execution.flow import Submission, Task
from hvdbridge.policy.base import anchored, finish, start_from, switches
from hvdbridge.policy.bucket import Layout
from hvdbridge.policy.collectives import used_here
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.autograd import ModuleHook


@dataclass(eq=False)
class OptimizerParameters:
    """The parameters of one optimizer; of an unknown one if ``optimizer`` is None."""

    optimizer: Optimizer | None
    layout: Layout
    parameters: list[Parameter]

    def flat(self) -> Tensor:
        """Return a flat copy of their values, in float32 or wider."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        return flat.to(torch.promote_types(flat.dtype, torch.float32))


def optimizer_parameters(params: Mapping[str, Parameter], optimizer: Optimizer | None = None) -> OptimizerParameters:
    return OptimizerParameters(optimizer, Layout({name: p.shape for name, p in params.items()}), list(params.values()))


class AfterStep:
    """Runs :meth:`Policy.after_step <hvdbridge.Policy.after_step>` for one synchronizer.

    Without an optimizer it runs over all parameters before their next use.
    """

    def __init__(
        self, aggregator: Aggregator, params: Mapping[str, Parameter], optimizers: Sequence[Optimizer], model: Module
    ) -> None:
        self.aggregator = aggregator
        self._model: Module | None = model
        self._optimizers = list(optimizers)
        self._unassigned = dict(params)  # parameters in no optimizer
        self._groups = self._assign()
        self._added: list[OptimizerParameters] = []  # to append to _groups at the next backward
        if not optimizers:
            self._groups.append(optimizer_parameters(self._unassigned))
            self._unassigned = {}
        self._hooks: list[Any] = []
        self._hooked: set[Optimizer] = set()
        self._due_step: int | None = None  # the step whose work is not complete
        self._recorded_step = -1
        self._next_group = 0  # index of the first group whose work has not begun
        self._stepped: set[Optimizer | None] = set()
        self._in_flight: list[tuple[Submission[Tensor | None], OptimizerParameters]] = []
        self._in_closure = False  # within step(closure)
        aggregator.post_step = self

    def record_due(self, step: int) -> None:
        """Record that the backward of ``step`` ends, and that its work is due. Harmless when repeated."""
        if self._recorded_step == step or not self.aggregator.policy.due(step):
            return
        self._due_step = self._recorded_step = step
        if not self._hooks and self._model is not None:
            hook = ModuleHook(self._before_forward)
            self._hooks.append(self._model.register_forward_pre_hook(hook, prepend=True))
            self._hook()

    def start(self) -> None:
        """Submit all work that is due, without waiting for it."""
        while self._due_step is not None:
            self._begin_next(self._due_step)

    def catch_up(self) -> None:
        """Complete all work that is due. Collective, but some ranks may have completed it earlier.

        Raises:
            BaseException: the scheduler's failure, the same cause on all ranks.
        """
        self._in_closure = False
        self.start()
        self._write_parameters()

    def before_backward(self) -> None:
        """Catch up at the last moment (rule 3), add new parameters (rule 7), and set the first anchors (rule 5)."""
        if not self._in_closure:
            self.catch_up()
            self.find_added()
            self._groups += self._added
            self._added.clear()
            if self._hooks:
                self._hook()
        if self.aggregator.step == 0:
            self._set_anchors(self._groups)

    def before_closure(self) -> None:
        """Catch up before a ``step(closure)``, whose forwards and backwards belong to one step (rule 4)."""
        if not self._in_closure:
            self.catch_up()
            self._in_closure = True

    def find_added(self) -> None:
        """Find parameters added to optimizers, before one of these steps (rule 7)."""
        if self._unassigned and self.aggregator.has_post_step:
            groups = self._assign()
            self._added += groups
            if self.aggregator.step > 0:
                self._set_anchors(groups)

    def discard_due(self) -> None:
        """Discard the work that is due, because another state was loaded."""
        self._due_step, self._recorded_step, self._next_group = None, -1, 0
        self._stepped.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._groups, self._added, self._optimizers, self._hooks = [], [], [], []
        self._hooked, self._unassigned, self._model = set(), {}, None

    def _assign(self) -> list[OptimizerParameters]:
        """Return groups of the unassigned parameters that an optimizer has now, and assign them."""
        groups = []
        for optimizer in self._optimizers:
            params = {p for group in optimizer.param_groups for p in group["params"]}
            new = {name: p for name, p in self._unassigned.items() if p in params}
            if new:
                groups.append(optimizer_parameters(new, optimizer))
                self._unassigned = {name: p for name, p in self._unassigned.items() if name not in new}
        return groups

    def _hook(self) -> None:
        for group in self._groups:
            if group.optimizer is not None and group.optimizer not in self._hooked:
                self._hooked.add(group.optimizer)
                self._hooks.append(group.optimizer.register_step_post_hook(self._after_optimizer))

    def _before_forward(self) -> None:
        if torch.is_grad_enabled() and not self._in_closure:
            self.catch_up()

    def _after_optimizer(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._in_closure = False
        if self._due_step is None:
            return
        self._stepped.add(optimizer)
        while self._due_step is not None and self._groups[self._next_group].optimizer in self._stepped:
            self._begin_next(self._due_step)
        self._write_parameters()

    @torch.no_grad()
    def _set_anchors(self, groups: Sequence[OptimizerParameters]) -> None:
        aggregator = self.aggregator
        for index, group in enumerate(groups if anchored(aggregator.policy) else ()):
            flat = group.flat()
            bucket = aggregator.bucket(flat, group.layout, index, 0)
            state = start_from(aggregator.policy, bucket, aggregator.store.part(group.layout))
            aggregator.store.merge(group.layout, state, flat)

    @torch.no_grad()
    def _begin_next(self, step: int) -> None:
        group, index = self._groups[self._next_group], self._next_group
        submission = Submission(self._flow(group.flat(), group.layout, index, step), self.aggregator.communicator)
        self._in_flight.append((self.aggregator.scheduler.submit(submission), group))
        self._next_group += 1
        if self._next_group == len(self._groups):
            self._due_step, self._next_group = None, 0
            self._stepped.clear()

    def _flow(self, flat: Tensor, layout: Layout, index: int, step: int) -> Task[Tensor | None]:
        aggregator = self.aggregator
        used_here(flat)
        bucket = aggregator.bucket(flat, layout, index, step)
        if aggregator.skipped:
            if not switches(aggregator.policy, step):
                return None
            bucket = replace(bucket, ranks=replace(bucket.ranks, weights=None))
        result = yield from finish(aggregator.policy.after_step(bucket, aggregator.store.part(layout)))
        return aggregator.store.merge(layout, result.state, result.update)

    @torch.no_grad()
    def _write_parameters(self) -> None:
        """Wait for the submitted work, and copy the results to the parameters."""
        while self._in_flight:
            submission, group = self._in_flight[0]
            update = submission.wait()
            self._in_flight.pop(0)
            self.aggregator.scheduler.order()
            if update is None:
                continue
            used_here(update)
            parts = update.split(list(group.layout.sizes.values()))
            # Copy to .data, so that a running backward (rule 3) may use the values that it saved.
            torch._foreach_copy_(
                [p.data for p in group.parameters],
                [part.view(p.shape) for part, p in zip(parts, group.parameters, strict=True)],
            )
