"""Exceptions of hvdbridge.

::

    HvdbridgeError (RuntimeError)
    ├── ConfigurationError (ValueError)  a name, option, environment variable or spec is not valid
    │   └── SpecError                    a policy spec string does not parse
    ├── NotInitialized                   hb.init() was not called, or the session was shut down
    ├── BackendUnavailable               the backend cannot run here; the message has the remedy
    ├── RendezvousError                  ranks did not find each other, or their number is wrong
    ├── RankMismatch                     backend, policy, model or options differ between ranks
    │   └── CollectiveMismatch           ranks issued different collectives (HVDBRIDGE_DEBUG=1)
    ├── WeightError (ValueError)         a weight is negative, not finite, or set on some ranks only
    ├── StepError                        backward() and step() in an order that loses gradients
    ├── Unsupported (TypeError)          an operation has no meaning for this tensor, policy or backend
    ├── CollectiveTimeout                a collective took longer than HVDBRIDGE_TIMEOUT_SECONDS
    └── RankFailed                       another rank raised, died or left; the message names it and its cause
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import groupby


class HvdbridgeError(RuntimeError):
    """Base class of the exceptions of this module."""


class ConfigurationError(HvdbridgeError, ValueError):
    """A name, option, environment variable or spec is not valid."""


class SpecError(ConfigurationError):
    """A policy spec string does not parse. The message marks the position."""


class NotInitialized(HvdbridgeError):
    """``hb.init()`` was not called, or the session was shut down. Without a session the message has no rank to name."""


class BackendUnavailable(HvdbridgeError):
    """The chosen backend cannot run here. The message has the reason and a remedy."""


class RendezvousError(HvdbridgeError):
    """Ranks did not find each other, or the library and the launcher disagree about rank or size."""


class RankMismatch(HvdbridgeError):
    """Backend, policy, model or options differ between ranks."""


class CollectiveMismatch(RankMismatch):
    """Ranks issued different collectives. The message names the ranks and the signatures."""


class WeightError(HvdbridgeError, ValueError):
    """A weight is negative, not finite, or set on some ranks and not on others."""


class StepError(HvdbridgeError):
    """``backward()`` and ``step()`` were called in an order that would lose or skip gradients."""


class Unsupported(HvdbridgeError, TypeError):
    """An operation has no meaning for this tensor, policy or backend."""


class CollectiveTimeout(HvdbridgeError):
    """A collective took longer than ``HVDBRIDGE_TIMEOUT_SECONDS``."""


class RankFailed(HvdbridgeError):
    """Another rank raised an exception, died or left. The message names the rank and the cause."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an "unknown name" message: the nearest known name, then all known names.

    >>> nearest("horovd", ["torch", "horovod", "mpi"])
    "Did you mean 'horovod'? Known: horovod, mpi, torch."
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}."


def ranks_text(ranks: Iterable[int]) -> str:
    """Return rank numbers as text for a message.

    >>> ranks_text([3, 0, 1, 2, 5]), ranks_text([4])
    ('ranks 0-3, 5', 'rank 4')
    """
    numbers = sorted(ranks)
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])  # equal for consecutive numbers
    runs = [[number for _, number in run] for _, run in groups]
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"
