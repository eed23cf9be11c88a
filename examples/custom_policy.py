"""A custom policy: the mean of the elements whose signs agree across ranks, and zero elsewhere.

    python examples/custom_policy.py                                          # simulated, then alone
    torchrun --nproc-per-node 2 examples/custom_policy.py                     # each of these on any backend:
    horovodrun -np 2 python examples/custom_policy.py                         #   HVDBRIDGE_BACKEND=torch
    mpiexec -n 2 python examples/custom_policy.py                             #   HVDBRIDGE_BACKEND=horovod
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 \\
        --master-addr HOST --master-port 29500 examples/custom_policy.py      #   HVDBRIDGE_BACKEND=mpi

A rank whose gradient has the opposite sign can veto an element (the idea of Parascandolo 2020, "Learning explanations
that are hard to vary").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import hvdbridge as hb
from hvdbridge.policy.options import option


@dataclass(frozen=True)
class Agreement(hb.Policy):
    """The weighted mean of the elements whose signs agree on at least ``share`` of the ranks; zero elsewhere.

    An aggregation takes one all-reduce of the gradient and one of the votes (int32). Each rank with a positive weight
    has one vote. A NaN casts no vote. Elements whose mean is NaN or infinite are kept.
    """

    share: float = option(1.0, above=0, at_most=1)

    def aggregate(self, bucket: hb.Bucket, state: hb.State) -> hb.Flow:
        votes = bucket.weighted().buffer.sign().nan_to_num().to(torch.int32)
        mean = yield hb.AllReduce(bucket.buffer)
        votes = yield hb.AllReduce(votes)
        voters = sum(w > 0 for w in bucket.weights or [1.0] * bucket.size)
        # If k of n ranks agree, the magnitude of the sum of votes is k - (n - k).
        agreed = votes.abs() >= (2 * self.share - 1) * voters
        return hb.Aggregated(torch.where(agreed | ~mean.isfinite(), mean, torch.zeros_like(mean)))


hb.policies.register("agreement", Agreement)


def simulated() -> None:
    """Simulate three ranks in this process: all agree on the first element, two on the second."""
    grads = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([3.0, -3.0])}]
    assert hb.simulate("agreement", grads)[0]["w"].allclose(torch.tensor([2.0, 0.0]))
    assert hb.simulate("agreement:share=0.6", grads, weights=[1, 1, 2])[2]["w"].allclose(torch.tensor([2.25, -0.75]))


def main() -> None:
    """Fit a line to points that each rank draws for itself."""
    simulated()
    hb.init()
    torch.manual_seed(hb.rank())
    model = torch.nn.Linear(1, 1)
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="agreement:share=0.75")
    model, optimizer = sync.model, sync.optimizer
    for _ in range(300):
        x = torch.rand(64, 1)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), 3 * x - 1).backward()
        optimizer.step()
    slope, intercept = (p.item() for p in model.parameters())
    if hb.rank() == 0:
        print(f"{hb.size()} ranks on {hb.backend()}: y = {slope:.3f} x {intercept:+.3f}   (3 x - 1)")
    assert abs(slope - 3) < 0.2, slope
    assert abs(intercept + 1) < 0.1, intercept
    sync.close()
    hb.shutdown()


if __name__ == "__main__":
    main()
