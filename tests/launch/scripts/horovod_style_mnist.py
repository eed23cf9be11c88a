"""A Horovod script in the manner of its MNIST example, on scikit-learn's digits; it knows nothing of hvdbridge."""

import argparse
import hashlib

import horovod
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from jobs import record
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.drop = nn.Dropout2d(0.2)
        self.norm = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 9, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.drop(self.norm(self.conv2(x)))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def mean_over_ranks(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(args):
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    parts = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])
    samplers = [DistributedSampler(part, num_replicas=hvd.size(), rank=hvd.rank()) for part in parts]
    loader, tests = (DataLoader(p, batch_size=args.batch_size, sampler=s) for p, s in zip(parts, samplers, strict=True))

    model = Net()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=0.5, weight_decay=args.weight_decay
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(args.epochs):
        model.train()
        samplers[0].set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        right = torch.cat([model(data).argmax(1) == target for data, target in tests])
    accuracy = mean_over_ranks(right.float().mean().item(), "accuracy")
    weights = b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())
    seen = {"weights": hashlib.sha256(weights).hexdigest(), "accuracy": accuracy}
    record(hvd.rank(), seen)
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--num-proc", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.num_proc:
        results = horovod.run(train, args=(arguments,), np=arguments.num_proc, use_gloo=True, verbose=1)
        assert len(results) == arguments.num_proc
        print("results", results[0]["accuracy"])
    else:
        train(arguments)
