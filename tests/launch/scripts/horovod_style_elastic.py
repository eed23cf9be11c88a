"""An elastic Horovod script, in the manner of Horovod's own: it knows nothing of hvdbridge.

Beside training it notes which samples each batch had, and worker --culprit kills itself once, before it takes part in
batch --kill-at of the last epoch.
"""

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from jobs import record
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--commit-every", type=int, default=2)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--culprit", type=int, default=1)
parser.add_argument("--how", choices=["kill", "raise", "exit", "internal"], default="kill")
parser.add_argument("--notes", type=Path, required=True)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(7 + hvd.rank())


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(96, 6, generator=generator)
        self.targets = torch.randint(0, 3, (96,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return index, self.inputs[index], self.targets[index]


dataset = Samples()
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True, seed=5)
loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
resets = []


def note(**what):
    with open(args.notes / f"{os.getpid()}-{hvd.rank()}", "a") as file:
        file.write(f"{time.time()} {what}\n")


def die():
    mark = args.notes / "killed"
    if hvd.rank() != args.culprit or mark.exists():
        return
    mark.touch()
    if args.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if args.how == "exit":
        os._exit(3)
    raise (hvd.HorovodInternalError if args.how == "internal" else RuntimeError)("this worker has a bug")


@hvd.elastic.run
def train(state):
    note(starts=(state.epoch, state.batch), left=len(sampler.remaining_indices))
    while state.epoch < args.epochs:
        for i, (indices, inputs, targets) in enumerate(loader):
            if state.epoch == args.epochs - 1 and state.batch == args.kill_at:
                die()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            sampler.record_batch(i, args.batch_size)
            state.batch += 1
            note(epoch=state.epoch, batch=state.batch, indices=indices.tolist())
            if state.batch % args.commit_every == 0:
                state.commit()
        state.epoch += 1
        state.batch = 0
        sampler.set_epoch(state.epoch)
        state.commit()
    return state.epoch


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
done = train(state)
total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="total").item()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
record(hvd.rank(), {"epochs": done, "size": total, "weights": hashlib.sha256(weights).hexdigest(), "resets": resets})
