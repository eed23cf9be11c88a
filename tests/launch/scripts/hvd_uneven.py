"""Optimizers whose ranks do not do the same at the same time: uneven data with ``hvd.join()``, and other orders.

The first argument is the module, so that the real Horovod can run it, too. Each rank records what it ended with, and
where one process can tell what must come out, how far from it that is.
"""

import hashlib
import importlib
import sys

import torch
from jobs import record
from torch import nn

hvd = importlib.import_module(sys.argv[1])
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def wrap(module, prefix, **options):
    named = [(f"{prefix}.{name}", p) for name, p in module.named_parameters()]
    return hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), named_parameters=named, **options)


def loss_of(module, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return module(torch.randn(3, 4, generator=generator)).square().mean()


def bits(*modules):
    data = b"".join(p.detach().numpy().tobytes() for module in modules for p in module.parameters())
    return hashlib.sha256(data).hexdigest()


def alone(module, counts, passes=1, start=0):
    """What must come out: the mean over all ranks, of which those without data give zeros."""
    for step in range(start, start + max(counts)):
        total = [torch.zeros_like(p) for p in module.parameters()]
        for rank, count in enumerate(counts):
            if step - start < count:
                module.zero_grad()
                for k in range(passes):
                    loss_of(module, rank, passes * step + k).backward()
                for t, p in zip(total, module.parameters(), strict=True):
                    t += p.grad
        with torch.no_grad():
            for t, p in zip(total, module.parameters(), strict=True):
                p -= 0.1 * t / len(counts)
    return module


def far(module, other):
    return max(
        float((p - q).abs().max().detach()) for p, q in zip(module.parameters(), other.parameters(), strict=True)
    )


@scenario
def join():
    """Some ranks have less data, in two epochs; in the first, the last rank has the most, in the second, rank 0."""
    m, twin = model(), model()
    optimizer = wrap(m, "join")
    lasts = []
    for epoch in range(2):
        counts = [2 + 2 * (hvd.size() - 1 - rank if epoch else rank) for rank in range(hvd.size())]
        for step in range(counts[hvd.rank()]):
            optimizer.zero_grad()
            loss_of(m, hvd.rank(), 100 * epoch + step).backward()
            optimizer.step()
        lasts.append(hvd.join())
        hvd.broadcast_parameters(m.state_dict(), root_rank=lasts[-1])
        alone(twin, counts, start=100 * epoch)
    return [bits(m), lasts, far(m, twin)]


@scenario
def join_without_data():
    """Rank 1 has none at all, and joins before the others' first step."""
    m = model()
    optimizer = wrap(m, "nothing")
    counts = [0 if rank == 1 else 3 for rank in range(hvd.size())]
    for step in range(counts[hvd.rank()]):
        optimizer.zero_grad()
        loss_of(m, hvd.rank(), step).backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(m.state_dict(), root_rank=0)
    return [bits(m), far(m, alone(model(), counts))]


@scenario
def join_two_optimizers():
    """In another order on each rank; in 16 bits, several passes per step, raw operations between."""
    a, b = model(1), model(2)
    options = {"compression": hvd.Compression.fp16, "backward_passes_per_step": 2}
    pairs = [(a, wrap(a, "a", **options)), (b, wrap(b, "b", **options))]
    counts = [2 + (rank % 3) for rank in range(hvd.size())]
    mine = pairs if hvd.rank() % 2 else pairs[::-1]
    for step in range(counts[hvd.rank()]):
        for _, optimizer in mine:
            optimizer.zero_grad()
        for k in range(2):
            for m, _ in mine:
                loss_of(m, hvd.rank(), 2 * step + k).backward()
        hvd.allreduce(torch.ones(1), name="between")
        for _, optimizer in mine:
            optimizer.step()
    last = hvd.join()
    for m, _ in pairs:
        hvd.broadcast_parameters(m.state_dict(), root_rank=last)
    return [bits(a, b), far(a, alone(model(1), counts, 2)) + far(b, alone(model(2), counts, 2))]


@scenario
def join_after_a_backward():
    """A step that is under way when its rank joins is completed by it."""
    m = model()
    optimizer = wrap(m, "late")
    for step in range(2):
        optimizer.zero_grad()
        loss_of(m, hvd.rank(), step).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(m, hvd.rank(), 2).backward()
    if hvd.rank() == 0:
        hvd.join()
        optimizer.step()
    else:
        optimizer.step()
        hvd.join()
    return [bits(m), far(m, alone(model(), [3] * hvd.size()))]


@scenario
def operation_before_or_after_backward():
    m = model()
    optimizer = wrap(m, "order")
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(m, hvd.rank(), step)
        if hvd.rank() == 0:
            loss.backward()
            hvd.allreduce(loss.detach(), name="loss")
        else:
            hvd.allreduce(loss.detach(), name="loss")
            loss.backward()
        optimizer.step()
    return [bits(m), far(m, alone(model(), [3] * hvd.size()))]


@scenario
def optimizers_in_another_order():
    """Their backwards, and their steps."""
    a, b = model(1), model(2)
    pairs = [(a, wrap(a, "first")), (b, wrap(b, "second"))]
    mine = pairs if hvd.rank() % 2 else pairs[::-1]
    for step in range(3):
        for m, optimizer in mine:
            optimizer.zero_grad()
            loss_of(m, hvd.rank(), step).backward()
        for _, optimizer in mine:
            optimizer.step()
    counts = [3] * hvd.size()
    return [bits(a, b), far(a, alone(model(1), counts)) + far(b, alone(model(2), counts))]


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    chosen = sys.argv[2:] or SCENARIOS
    record(hvd.rank(), {name: SCENARIOS[name]() for name in chosen})
    hvd.shutdown()
