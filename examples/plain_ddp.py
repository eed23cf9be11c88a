"""train.py without hvdbridge: plain DistributedDataParallel with the same model, data, seed and order.

::

    torchrun --nproc-per-node 2 examples/plain_ddp.py

This script is the reference: train.py with `mean` ends with the same bits on every backend. The difference of the two
scripts shows what adopting hvdbridge changes in a training loop.
"""

from __future__ import annotations

import os
import sys

import data
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DistributedSampler
from train import Log, accuracy, arguments, build, report, set_learning_rate


def main() -> None:
    args = arguments()
    if args.uneven or args.policy or args.checkpoint:
        raise SystemExit("plain_ddp.py knows no --uneven, --policy or --checkpoint")
    device, backend = torch.device("cpu"), "gloo"
    if gpus := torch.cuda.device_count():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)
        if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):  # NCCL requires a GPU for each rank
            backend = "nccl"
    dist.init_process_group(backend)
    train, test = (part.to(device) for part in data.load(args.data, args.data_dir))
    inputs, labels = train
    net, optimizer = build(args, train, device)
    model = DistributedDataParallel(net)

    sampler = DistributedSampler(train.labels, seed=args.seed)
    batches = BatchSampler(sampler, args.batch_size, drop_last=False)
    total = min(args.epochs * len(batches), args.steps or sys.maxsize)
    step = 0
    with Log(step, total, visible=dist.get_rank() == 0) as log:
        for epoch in range(-(-total // len(batches))):
            sampler.set_epoch(epoch)
            for indices in list(batches)[: total - step]:
                set_learning_rate(optimizer, args.lr, step / total)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs[indices]), labels[indices])
                loss.backward()
                optimizer.step()
                step += 1
                log.step(loss)
            log.epoch(epoch, accuracy(model, test))
    if dist.get_rank() == 0:
        # A ring all-reduce sends 2 (n - 1) / n of the gradient per rank, and the gradient is float32.
        ranks = dist.get_world_size()
        gradient = sum(p.numel() * p.element_size() for p in net.parameters())
        sent = 2 * (ranks - 1) * gradient // ranks
        report(log, net, args.metrics, bytes_sent=sent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
