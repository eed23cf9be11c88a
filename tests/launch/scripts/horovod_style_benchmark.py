"""A Horovod script in the manner of Horovod's synthetic benchmark; it knows nothing of hvdbridge."""

import argparse
import hashlib
import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from jobs import record
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=2)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten())
model = nn.Sequential(model, nn.LazyLinear(100))
data = torch.randn(args.batch_size, 3, 32, 32)
target = torch.randint(0, 100, (args.batch_size,))
model(data)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text)


timeit.timeit(step, number=args.num_warmup_batches)
for number in range(args.num_iters):
    seconds = timeit.timeit(step, number=args.num_batches_per_iter)
    log(f"iteration {number}: {args.batch_size * args.num_batches_per_iter / seconds:.1f} images/s per process")
weights = b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())
record(hvd.rank(), {"weights": hashlib.sha256(weights).hexdigest()})
