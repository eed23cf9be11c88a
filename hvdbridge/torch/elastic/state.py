"""The state of elastic training: objects, models, optimizers and samplers, with their last commit.

Rules:

1. ``save`` keeps a copy in memory, ``restore`` goes back to it, ``sync`` gives all ranks rank 0's.
2. ``commit`` also writes the copy where a restart of this process finds it, if the launcher restarts processes
   (:mod:`.restart`), and checks whether hosts came or went.
3. Copies hold no handles and no groups: they pickle.
"""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdbridge.torch import basics
from hvdbridge.torch.elastic import restart
from hvdbridge.torch.elastic.sampler import ElasticSampler
from hvdbridge.torch.exceptions import HorovodInternalError as HorovodInternalError
from hvdbridge.torch.exceptions import HostsUpdatedInterrupt
from hvdbridge.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters

REMOVED = 1
"""Horovod's mark of an update that only takes hosts away."""


class State:
    """Base of states; a subclass defines ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object: gives all ranks rank 0's object.
        get_rank: without effect.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these, in order, when training goes on with other ranks: to scale a learning rate, for one."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the ranks have changed, before :meth:`sync`."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Called by the launcher's client, in a thread of its own."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep a copy of the present values, to which a failure goes back; collective.

        Under torchrun it also writes a file, so a commit every many batches is enough.

        Raises:
            HostsUpdatedInterrupt: see :meth:`check_host_updates`.
        """
        self.save()
        restart.keep(self)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Whether hosts came or went since the last call; collective.

        Raises:
            HostsUpdatedInterrupt: on every rank, if rank 0 received an update.
        """
        if not restart.hosts_may_change():
            return
        before, latest, update = self._last_updated_timestamp, self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= int(result)
        before, self._last_updated_timestamp, update = self._bcast_object((before, latest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == REMOVED)

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks rank 0's values, and keep them as the copy."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called by :meth:`on_reset`; for a subclass."""

    def saved(self) -> Any:
        """The last copy, to be pickled; None: this kind of state cannot outlive its process."""
        return None

    def adopt(self, saved: Any) -> None:
        """Make a value of :meth:`saved` the last copy, and go back to it."""


class ObjectState(State):
    """Python objects by name, which become attributes.

    Args:
        bcast_object, get_rank: as for :class:`State`.
        kwargs: the objects; they pickle.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        ObjectState.restore(self)
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def sync(self) -> None:
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)

    def saved(self) -> Any:
        return self._saved_state

    def adopt(self, saved: Any) -> None:
        self._saved_state = dict(saved)
        self.restore()


class TorchState(ObjectState):
    """A model, an optimizer, and anything else by name; several models and optimizers by names of their own.

    It keeps models, optimizers and :class:`ElasticSampler` by their ``state_dict``, and pickles other values.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        kwargs: become attributes.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: handler for name, value in values.items() if (handler := get_handler(value)) is not None}
        vars(self).update({name: values.pop(name) for name in handlers}, _handlers=handlers)
        super().__init__(broadcast_object, basics.rank, **values)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def saved(self) -> Any:
        kept = {name: {k: v for k, v in vars(h).items() if k != "value"} for name, h in self._handlers.items()}
        return {"handlers": kept, "objects": self._saved_state}

    def adopt(self, saved: Any) -> None:
        for name, kept in saved["handlers"].items():
            vars(self._handlers[name]).update(kept)
        super().adopt(saved["objects"])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Keeps one object of a kind that has a state of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Keep another object from now on."""
        self.value = value
        self.save()


class _DictHandler(StateHandler):
    """By ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_DictHandler):
    """A ``torch.nn.Module``."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_DictHandler):
    """A ``torch.optim.Optimizer``."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_DictHandler):
    """An :class:`ElasticSampler`."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a type and its handler; the first that fits counts."""
    return _registry


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs of :func:`get_handler_registry` for new states."""
    global _registry
    _registry = list(registry)


def get_handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """The wrapper of :func:`hvdbridge.torch.elastic.run`; ``reset`` ends the session and begins another."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        with restart.elastic(state):
            restart.resume(state)
            skip_sync = False
            while True:
                failure: BaseException | None = None
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HostsUpdatedInterrupt as update:
                    skip_sync = update.skip_sync
                except restart.FAILURES as error:
                    failure, skip_sync = error, False
                # Outside of the except clauses: there the exception would keep the session's objects alive.
                if failure is None:
                    restart.hosts_changed(state)
                else:
                    restart.failed(state, failure)
                    state.restore()
                reset()
                state.on_reset()

    return wrapper
