"""Gradient accumulation that weights all tokens equally: sequences of unequal lengths, windows of micro-batches.

::

    python examples/tokens.py
    torchrun --nproc-per-node 2 examples/tokens.py
    horovodrun -np 2 python examples/tokens.py
    mpiexec -n 2 python examples/tokens.py

A loss that is averaged per micro-batch, and then over micro-batches and ranks, gives the tokens of a short micro-batch
more weight than those of a long one. Here each rank first counts the tokens T_r of its whole window, divides its sum of
losses by T_r, and takes T_r as its weight:

    sum_r T_r (1/T_r sum of the gradients of its tokens) / sum_r T_r = the mean over all tokens of the step

A single process with all micro-batches computes the same. Some ranks may have no micro-batch in the last window: they
leave the loop, and `join()` lets the other ranks continue without them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hvdbridge as hb

VOCABULARY = 17
PADDING = -100
Window = Sequence[Sequence[Tensor]]
"""The micro-batches of one rank in one step; each is a sequence of token tensors."""


def sequences(count: int, seed: int) -> list[Tensor]:
    """Return ``count`` sequences of 3 to 24 token ids (int64), most of which follow from the two ids before them."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for length in torch.randint(3, 25, (count,), generator=generator).tolist():
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        for i in range(2, length):
            if torch.rand((), generator=generator) < 0.9:
                tokens[i] = (3 * tokens[i - 1] + tokens[i - 2]) % VOCABULARY
        result.append(tokens)
    return result


def windows(data: Sequence[Tensor], micro_batch: int, accumulate: int, rank: int, size: int) -> Iterator[Window]:
    """Yield the micro-batches that this rank accumulates in each step; the last step may have fewer, or none."""
    batches = [data[i : i + micro_batch] for i in range(0, len(data), micro_batch)]
    for i in range(0, len(batches), accumulate):
        yield batches[i : i + accumulate][rank::size]


class Model(nn.Module):
    """Predict each next token from two tokens: ids ``[n, length]`` to logits ``[n, length, VOCABULARY]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.head = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        previous = F.pad(embedded, (0, 0, 1, 0))[:, :-1]
        logits: Tensor = self.head(torch.cat([previous, embedded], dim=-1))
        return logits


def summed_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the summed cross-entropy of all tokens that have a predecessor in their sequence."""
    padded = nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=PADDING)
    scores, targets = model(padded[:, :-1].clamp(min=0)), padded[:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")


def train(steps: Iterator[Window], lr: float, seed: int, policy: str | None = None) -> tuple[Model, list[float]]:
    """Return the trained model, and the loss per token of each of this rank's windows."""
    torch.manual_seed(seed)
    model = Model()
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9), policy, weighted=True)
    losses = []
    with sync.join():
        for window in steps:
            if not window:
                break
            tokens = sum(len(sequence) - 1 for batch in window for sequence in batch)
            total = 0.0
            sync.weight = tokens
            sync.optimizer.zero_grad()
            for number, batch in enumerate(window, start=1):
                with nullcontext() if number == len(window) else sync.no_sync():
                    loss = summed_loss(sync.model, batch)
                (loss / tokens).backward()
                total += loss.item()
            sync.optimizer.step()
            losses.append(total / tokens)
    sync.close()
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=3000)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences")
    parser.add_argument("--accumulate", type=int, default=8, help="micro-batches of all ranks in a step")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="write the losses there, as JSON")
    args = parser.parse_args()
    with hb.session():
        data = sequences(args.sequences, args.seed)
        mine = windows(data, args.micro_batch, args.accumulate, hb.rank(), hb.size())
        _, losses = train(mine, args.lr, args.seed)
        if hb.rank() == 0:
            print(f"loss per token: {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last of {len(losses)}")
            if args.metrics:
                args.metrics.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
