"""How a rank that has called hvd.join() follows the others' optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hvdbridge.errors import CollectiveTimeout, RankFailed
from hvdbridge.torch import asynchronous
from hvdbridge.torch.exceptions import internal_error
from hvdbridge.training import runtime

if TYPE_CHECKING:
    from hvdbridge.torch.optimizer import _Distributed


class Follower:
    """What an optimizer does when this rank called ``hvd.join()``; see :mod:`hvdbridge.torch.joining`."""

    def __init__(self, optimizer: _Distributed) -> None:
        self._optimizer = optimizer

    def channel(self) -> tuple[int, str]:
        process_set = self._optimizer.process_set
        if process_set.process_set_id is None or not self._optimizer._active or self._optimizer._only_was():
            return -1, ""
        return asynchronous._number(process_set), f"channel.{self._optimizer._expected_name()}"

    def follow(self, step: int) -> None:
        with internal_errors():
            reducer = self._optimizer._ready() if step else None
            if reducer is None:
                self._optimizer._hook()
                reducer = self._optimizer._open()
            reducer.follow(step)

    def join(self, begins: bool) -> None:
        reducer = self._optimizer._ready()
        if reducer is not None and reducer.running:
            with internal_errors():
                if begins:
                    reducer.hand_in()
                else:
                    reducer.end_following()


@contextmanager
def internal_errors() -> Iterator[None]:
    """The failure of another rank as what Horovod's users catch."""
    try:
        yield
    except Exception as error:
        # A library below says in its own words that a peer is gone; the monitor knows why.
        cause = runtime.current().monitor.cause_of(error)
        if isinstance(cause, (RankFailed, CollectiveTimeout)):
            raise internal_error(str(cause)) from error
        raise
