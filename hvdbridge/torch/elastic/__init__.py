"""``hvd.elastic``: elastic training, which resumes from the last commit when ranks are lost.

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

The reaction to a lost rank depends on the launcher: see the table in :mod:`.restart`.
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
    """Decorate ``func(state, ...)`` so that it runs again after a failure or a change of hosts.

    Before each run all ranks get rank 0's ``state``; after a failure that is the last commit. ``func`` must resume from
    ``state``. The script must not call a collective before ``func``, because a new worker would start with it while
    the others do not.

    Raises:
        HorovodInternalError, RankFailed: a rank is lost, and the launcher does not replace it.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
