"""What a policy does to the parameters after the optimizer stepped: when it runs, in which order, on whose parameters.

Rules:

1. A step for which it is due is noted when its backward ends; from then on this part is outstanding.
2. It runs per optimizer, over the parameters that this one holds, in a hook after its step. Optimizers come in one
   order on all ranks, that of the synchronizer's list: one that stepped early waits for those before it.
3. An optimizer's step may not happen, and on one rank alone: gradients are local under drifting policies, and
   GradScaler skips the step of a rank that saw an overflow. What is outstanding then runs before parameters are used:
   in the next forward that records gradients, at the latest when the next backward begins. So no rank waits for ever.
4. Within ``step(closure)`` it waits for the end of the step, whatever the closure does.
5. What a policy remembers of the parameters it began with are those of the first backward: weights may be loaded
   after the synchronizer was constructed, the same on every rank.
6. Hooks are registered when something is due for the first time: most policies never pay for them.
7. Parameters that an optimizer is given later are among these from the next backward on, which comes after the same
   step on all ranks, and begin with their values before that optimizer's first step.
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
class Held:
    """The parameters that one optimizer holds (None: nobody said which do)."""

    optimizer: Optimizer | None
    layout: Layout
    parameters: list[Parameter]

    def flat(self) -> Tensor:
        """A copy of their values, in float32 or wider."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        return flat.to(torch.promote_types(flat.dtype, torch.float32))


def holding(mine: Mapping[str, Parameter], optimizer: Optimizer | None = None) -> Held:
    return Held(optimizer, Layout({name: p.shape for name, p in mine.items()}), list(mine.values()))


class AfterStep:
    """Runs :meth:`Policy.after_step <hvdbridge.Policy.after_step>` of one synchronizer.

    Without an optimizer it runs over all parameters, before they are used again.
    """

    def __init__(
        self, aggregator: Aggregator, params: Mapping[str, Parameter], optimizers: Sequence[Optimizer], model: Module
    ) -> None:
        self.aggregator = aggregator
        self._model: Module | None = model
        self._optimizers = list(optimizers)
        self._left = dict(params)  # that no optimizer holds
        self._holders = self._find()
        self._adopted: list[Held] = []  # holders of the next backward
        if not optimizers:
            self._holders.append(holding(self._left))
            self._left = {}
        self._hooks: list[Any] = []
        self._hooked: set[Optimizer] = set()
        self._step: int | None = None  # the step that is outstanding
        self._noted = -1
        self._next = 0  # the first of the holders that has not begun
        self._stepped: set[Optimizer | None] = set()
        self._open: list[tuple[Submission[Tensor | None], Held]] = []
        self._within = False  # a step(closure)
        aggregator.after = self

    def note(self, step: int) -> None:
        """The backward of ``step`` ends: something may be outstanding now. Harmless when repeated."""
        if self._noted == step or not self.aggregator.policy.due(step):
            return
        self._step = self._noted = step
        if not self._hooks and self._model is not None:
            hook = ModuleHook(self._before_forward)
            self._hooks.append(self._model.register_forward_pre_hook(hook, prepend=True))
            self._hook()

    def start(self) -> None:
        """Begin all that is outstanding, without waiting for it."""
        while self._step is not None:
            self._begin_next(self._step)

    def catch_up(self) -> None:
        """Do all that is outstanding. Every rank comes here, or did its part before.

        Raises:
            BaseException: the scheduler's failure, the same cause on all ranks.
        """
        self._within = False
        self.start()
        self._write()

    def before_backward(self) -> None:
        """The last moment to catch up (rule 3), and the first at which the parameters are those to train (rule 5)."""
        if not self._within:
            self.catch_up()
            self.adopt()
            self._holders += self._adopted
            self._adopted.clear()
            if self._hooks:
                self._hook()
        if self.aggregator.step == 0:
            self._start_from(self._holders)

    def before_closure(self) -> None:
        """A ``step(closure)`` begins: its forwards and backwards are part of it."""
        if not self._within:
            self.catch_up()
            self._within = True

    def adopt(self) -> None:
        """Look for parameters that optimizers were given since, before one of these steps (rule 7)."""
        if self._left and self.aggregator.acts_after:
            found = self._find()
            self._adopted += found
            if self.aggregator.step > 0:
                self._start_from(found)

    def forget(self) -> None:
        """Nothing is outstanding: another state was loaded."""
        self._step, self._noted, self._next = None, -1, 0
        self._stepped.clear()

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._holders, self._adopted, self._optimizers, self._hooks = [], [], [], []
        self._hooked, self._left, self._model = set(), {}, None

    def _find(self) -> list[Held]:
        """Of what nobody held: what an optimizer holds now."""
        found = []
        for optimizer in self._optimizers:
            held = {p for group in optimizer.param_groups for p in group["params"]}
            mine = {name: p for name, p in self._left.items() if p in held}
            if mine:
                found.append(holding(mine, optimizer))
                self._left = {name: p for name, p in self._left.items() if name not in mine}
        return found

    def _hook(self) -> None:
        for held in self._holders:
            if held.optimizer is not None and held.optimizer not in self._hooked:
                self._hooked.add(held.optimizer)
                self._hooks.append(held.optimizer.register_step_post_hook(self._after_optimizer))

    def _before_forward(self) -> None:
        if torch.is_grad_enabled() and not self._within:
            self.catch_up()

    def _after_optimizer(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._within = False
        if self._step is None:
            return
        self._stepped.add(optimizer)
        while self._step is not None and self._holders[self._next].optimizer in self._stepped:
            self._begin_next(self._step)
        self._write()

    @torch.no_grad()
    def _start_from(self, holders: Sequence[Held]) -> None:
        aggregator = self.aggregator
        for index, held in enumerate(holders if anchored(aggregator.policy) else ()):
            flat = held.flat()
            bucket = aggregator.bucket(flat, held.layout, index, 0)
            state = start_from(aggregator.policy, bucket, aggregator.store.part(held.layout))
            aggregator.store.merge(held.layout, state, flat)

    @torch.no_grad()
    def _begin_next(self, step: int) -> None:
        held, index = self._holders[self._next], self._next
        pending = Submission(self._flow(held.flat(), held.layout, index, step), self.aggregator.communicator)
        self._open.append((self.aggregator.scheduler.submit(pending), held))
        self._next += 1
        if self._next == len(self._holders):
            self._step, self._next = None, 0
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
        aggregator.store.merge(layout, result.state, result.update)
        return result.update

    @torch.no_grad()
    def _write(self) -> None:
        """Wait for what has begun, and give the parameters their new values."""
        while self._open:
            pending, held = self._open[0]
            update = pending.wait()
            self._open.pop(0)
            self.aggregator.scheduler.order()
            if update is None:
                continue
            used_here(update)
            parts = update.split(list(held.layout.sizes.values()))
            # By way of .data: should a backward be running (rule 3), it goes on with the values that it saved.
            torch._foreach_copy_(
                [p.data for p in held.parameters],
                [part.view(p.shape) for part, p in zip(parts, held.parameters, strict=True)],
            )
