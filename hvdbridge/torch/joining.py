"""Who takes part in the steps of others for a rank that called ``hvd.join()``.

Rules:

1. Steps of a ``DistributedOptimizer`` are not negotiated, so a rank that joined cannot see them coming. While somebody
   has joined, ranks announce through the coordinator which step of which channel they begin, and who joined follows
   with zeros. As long as nobody has, nothing is sent.
2. A channel that is not open yet on the rank that joined is opened by the optimizer that it belongs to.
3. A follower hands in a step and does not wait for it: those it follows may need another channel to go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary


class Follower(Protocol):
    """An optimizer whose steps ranks that joined can take part in."""

    def channel(self) -> tuple[int, str]:
        """Process set and name of its channel, the same on all ranks; if it has none yet, of the next one."""
        ...

    def follow(self, step: int) -> None:
        """Hand in zeros for its steps up to this number; 0: only open the channel."""
        ...

    def join(self, begins: bool) -> None:
        """This rank joins: hand in what is outstanding. All have joined (not ``begins``): await what was followed."""
        ...


_followers: WeakValueDictionary[int, Follower] = WeakValueDictionary()
_numbers = count()


def add(follower: Follower) -> None:
    """From now on it follows, until nobody holds it any more."""
    _followers[next(_numbers)] = follower


def followers() -> Iterator[Follower]:
    """In the order of construction, which names of channels depend on where parameters' names are the same."""
    for number in sorted(_followers):
        if (found := _followers.get(number)) is not None:
            yield found


def find(process_set: int, name: str) -> Follower | None:
    """The one with this channel."""
    return next((each for each in followers() if each.channel() == (process_set, name)), None)
