"""The last gradient is held back until the first collective of the step has started: without overlap it never comes.
Under DDP, what has arrived is taken over before the step waits for all that travels."""

from __future__ import annotations

import threading
from typing import Any

import torch
from jobs import record
from torch import nn

import hvdbridge as hb

started = threading.Event()


class Hold(torch.autograd.Function):
    """Identity; backward waits for the first collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert not ctx.needs_input_grad[0] or started.wait(20), "no collective started while backward went on"
        return gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.hold = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(Hold.apply(hidden) if self.hold else hidden)


hb.init()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# With weights DDP has our communication hook, in the place of its own all-reduce
sync = hb.GradientSynchronizer(model, optimizer, bucket_mb=0.001, gradient_as_bucket_view=False, weighted=True)
torch.manual_seed(1 + hb.rank())  # whose gradients are not their mean
answer = sync._context.communicator._answer


def spy(request: Any) -> Any:
    started.set()
    return answer(request)


sync._context.communicator._answer = spy  # type: ignore[method-assign]
taken_over: list[torch.Tensor] = []
if hb.backend() == "torch":
    source: Any = sync._source
    finish = source._finish

    def spied_finish() -> None:
        assert model.last.weight.grad is not None
        taken_over.append(model.last.weight.grad.clone())
        finish()

    source._finish = spied_finish
for step in range(4):
    model.hold = step >= 2  # DDP rebuilds its one bucket after the first step
    started.clear()
    sync.optimizer.zero_grad()
    sync.model(torch.randn(8, 64)).square().mean().backward()
    sync.optimizer.step()
    if hb.backend() == "torch":
        assert len(taken_over) == 1
        assert torch.equal(taken_over.pop(), model.last.weight.grad), "DDP waited for the whole step"
record(hb.rank(), "overlapped")
hb.shutdown()
