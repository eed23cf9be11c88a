"""``hvd.elastic``: training that goes on when ranks are lost, from the last commit.

::

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for i, (x, y) in enumerate(loader):          # loader's sampler: hvd.elastic.ElasticSampler
                ...
                state.sampler.record_batch(i, batch_size)
                if i % 100 == 0:
                    state.commit()
            state.sampler.set_epoch(state.epoch + 1)

    train(hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler))

What follows a lost rank depends on the launcher; :mod:`.restart` has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdbridge.torch.basics import init, shutdown
from hvdbridge.torch.elastic.sampler import ElasticSampler
from hvdbridge.torch.elastic.state import ObjectState, State, TorchState, run_fn
from hvdbridge.torch.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "init",
    "run", "shutdown",
]  # fmt: skip


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run ``func(state, ...)``, and run it again after a failure or a change of hosts.

    All ranks get rank 0's ``state`` before each run; after a failure it is that of the last commit. ``func`` continues
    from ``state``. The script calls no collective before ``func``: a new worker would meet it elsewhere.

    Raises:
        HorovodInternalError, RankFailed: a rank is lost, and the launcher replaces none.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
