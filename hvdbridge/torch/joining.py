"""The optimizers that take part in the steps of others after this rank called ``hvd.join()``.

Rules:

1. Steps of a ``DistributedOptimizer`` are not negotiated, so a joined rank does not know of them. While a rank has
   joined, the others announce to the coordinator the step of each channel that they begin, and the joined rank follows
   with zeros. Otherwise nothing is sent.
2. If a channel is not open yet on the joined rank, the optimizer that it belongs to opens it.
3. A follower submits a step and does not wait for it: the other ranks may need another channel first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary


class Follower(Protocol):
    """An optimizer in whose steps a joined rank can take part."""

    def channel(self) -> tuple[int, str]:
        """Process set and name of its channel, or of the one that it would open next; the same on all ranks."""
        ...

    def follow(self, step: int) -> None:
        """Submit zeros for its steps up to this number; 0: only open the channel."""
        ...

    def join(self, begins: bool) -> None:
        """``begins``: this rank joins, so submit what is missing in its step. Otherwise all ranks have joined, so wait
        for the steps that it followed."""
        ...


_followers: WeakValueDictionary[int, Follower] = WeakValueDictionary()
_numbers = count()


def add(follower: Follower) -> None:
    """Let it follow until it is garbage."""
    _followers[next(_numbers)] = follower


def followers() -> Iterator[Follower]:
    """In the order of construction: names of channels depend on it if parameters' names are equal."""
    for number in sorted(_followers):
        if (found := _followers.get(number)) is not None:
            yield found


def find(process_set: int, name: str) -> Follower | None:
    """The follower with this channel."""
    return next((each for each in followers() if each.channel() == (process_set, name)), None)
