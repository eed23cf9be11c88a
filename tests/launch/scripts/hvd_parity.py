"""A script for Horovod as its users write it; each rank records a digest of all results. Argument: the module."""

from __future__ import annotations

import hashlib
import sys
from importlib import import_module
from typing import Any

import jobs
import torch


def main(module: str) -> None:
    hvd: Any = import_module(module)
    hvd.init()
    torch.manual_seed(hvd.rank())
    digest = hashlib.sha256()
    results: list[torch.Tensor] = []
    for dtype in (torch.float16, torch.float32, torch.float64):
        for shape in ((1,), (1000,), (33, 77)):
            x = torch.randn(shape).to(dtype)
            results += [hvd.allreduce(x, name="average"), hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.3)]
            results += [hvd.allreduce(x, postscale_factor=0.7), hvd.allreduce_(x.clone(), op=hvd.Product)]
            results += [hvd.allreduce(x, op=hvd.Max), hvd.allgather(x), hvd.broadcast(x, 1)]
            results += hvd.grouped_allreduce([x, x * 3], postscale_factor=1.1)
            results += [hvd.reducescatter(x.repeat(3, *[1] * (x.dim() - 1)), op=hvd.Average)]
    single = torch.randn(500)
    results.append(hvd.allreduce(single, compression=hvd.Compression.fp16))
    numbers = torch.randint(-1000, 1000, (500,))
    results += [hvd.allreduce(numbers), hvd.allreduce(numbers, op=hvd.Sum, prescale_factor=0.37)]
    output, received = hvd.alltoall(single, splits=[hvd.rank() + 1, 100])
    results += [output, received]
    torch.manual_seed(0)
    weight = torch.randn(5, requires_grad=True)
    (hvd.allreduce(weight * (hvd.rank() + 1)).square().sum() + hvd.allgather(weight).pow(3).sum()).backward()
    results.append(weight.grad)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    results += [*model.parameters(), *(state["step"] for state in optimizer.state_dict()["state"].values())]
    for result in results:
        digest.update(str((result.dtype, tuple(result.shape))).encode())
        digest.update(result.detach().contiguous().numpy().tobytes())
    jobs.record(hvd.rank(), digest.hexdigest())
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
