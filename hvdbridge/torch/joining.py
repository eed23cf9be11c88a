"""Followers: the optimizers by which a joined rank contributes zeros to the steps of other ranks.

Rules:

1. Steps of a ``DistributedOptimizer`` are not negotiated. While a rank has joined (``hvd.join()``), the others announce
   to the coordinator each step that they begin, and the joined rank submits zeros. At other times no rank announces.
2. If a channel is not open yet on the joined rank, the optimizer that it belongs to opens it.
3. A follower submits a step and does not wait for it, because the other ranks may need another channel first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary


class Follower(Protocol):
    """An optimizer in whose steps a joined rank can take part."""

    def channel(self) -> tuple[int, str]:
        """Return process set and name of the open channel, or of the one to open next; equal on all ranks."""
        ...

    def follow(self, step: int) -> None:
        """Submit zeros for the steps up to number ``step``; 0: only open the channel."""
        ...

    def join(self, begins: bool) -> None:
        """Begin or end the join. With ``begins`` this rank joins: submit the missing gradients of its own open step.
        Otherwise all ranks have joined: wait for the followed steps."""
        ...


_followers: WeakValueDictionary[int, Follower] = WeakValueDictionary()
_numbers = count()


def register(follower: Follower) -> None:
    """Register a follower, held by a weak reference."""
    _followers[next(_numbers)] = follower


def followers() -> Iterator[Follower]:
    """Yield followers in the order of construction, on which names of channels depend if parameters share names."""
    for number in sorted(_followers):
        if (follower := _followers.get(number)) is not None:
            yield follower


def find_follower(process_set: int, name: str) -> Follower | None:
    """Return the follower with this channel, or None."""
    return next((follower for follower in followers() if follower.channel() == (process_set, name)), None)
