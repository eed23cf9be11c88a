"""The state of elastic training: objects, models, optimizers and samplers, with their last commit.

Rules:

1. ``save`` copies the state in memory, ``restore`` loads the copy, and ``sync`` broadcasts rank 0's state.
2. ``commit`` also writes the copy to a file if the launcher restarts processes (:mod:`.restart`), and checks whether
   hosts were added or removed.
3. Copies contain no handles and no process groups, so they can be pickled.
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

HOSTS_REMOVED_ONLY = 1
"""Horovod's code for an update that removes hosts and adds none."""


class State:
    """Base of states of elastic training. A subclass implements ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object: broadcasts rank 0's object to all ranks, and returns it.
        get_rank: ignored.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Add functions to call, in order, after the ranks have changed, such as one that scales a learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset the state after the ranks have changed, and run the callbacks. Called before :meth:`sync`."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record a change of hosts. The launcher's client calls this in its own thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the current values, which are restored after a failure; collective.

        Under torchrun this also writes a file, so commit only once in many batches.

        Raises:
            HostsUpdatedInterrupt: see :meth:`check_host_updates`.
        """
        self.save()
        restart.record_commit(self)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether hosts were added or removed since the last call; collective.

        Raises:
            HostsUpdatedInterrupt: on every rank, if the launcher reported a change of hosts to rank 0.
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
            raise HostsUpdatedInterrupt(update == HOSTS_REMOVED_ONLY)

    def save(self) -> None:
        """Save a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Load the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast rank 0's values to all ranks, and save them; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Hook of subclasses that :meth:`on_reset` calls."""

    def saved(self) -> Any:
        """Return the last copy for pickling; None if this kind of state does not support a restart of the process."""
        return None

    def adopt(self, saved: Any) -> None:
        """Replace the last copy by a return value of :meth:`saved`, and restore it."""


class ObjectState(State):
    """State of Python objects, which are attributes.

    Args:
        bcast_object, get_rank: see :class:`State`.
        kwargs: picklable objects by name of the attribute.
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
    """State of a model, an optimizer and other objects, which are attributes.

    Models, optimizers and :class:`ElasticSampler` are saved by their ``state_dict``, other objects by pickle.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        kwargs: further objects by name of the attribute; these may be modules and optimizers, too.
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
        copies = {name: {k: v for k, v in vars(h).items() if k != "value"} for name, h in self._handlers.items()}
        return {"handlers": copies, "objects": self._saved_state}

    def adopt(self, saved: Any) -> None:
        for name, copies in saved["handlers"].items():
            vars(self._handlers[name]).update(copies)
        super().adopt(saved["objects"])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Saves, restores and broadcasts the state of one object; a subclass per type."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the object, and save the new one."""
        self.value = value
        self.save()


class _DictHandler(StateHandler):
    """Base of handlers that use ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_DictHandler):
    """Handler of a ``torch.nn.Module``."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_DictHandler):
    """Handler of a ``torch.optim.Optimizer``."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_DictHandler):
    """Handler of an :class:`ElasticSampler`."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return pairs of a type and its handler class. The first pair whose type matches is used."""
    return _registry


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs of :func:`get_handler_registry`, for states made afterwards."""
    global _registry
    _registry = list(registry)


def get_handler(value: Any) -> StateHandler | None:
    """Return a new handler of ``value``, or None if no registered type matches."""
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Wrap ``func`` for :func:`hvdbridge.torch.elastic.run`; ``reset`` ends the session and starts another."""

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
                # Outside of the except clauses, because there the exception keeps the session's objects alive.
                if failure is None:
                    restart.handle_host_change(state)
                else:
                    restart.handle_failure(state, failure)
                    state.restore()
                reset()
                state.on_reset()

    return wrapper
