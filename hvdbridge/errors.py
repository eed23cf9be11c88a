"""Every error that hvdbridge raises on purpose.

::

    HvdbridgeError (RuntimeError)
    ├── ConfigurationError (ValueError)  a name, option, variable or spec that cannot be meant
    │   └── SpecError                    a policy spec string that does not parse
    ├── NotInitialized                   hb.init() is missing, or the session was shut down
    ├── BackendUnavailable               the backend cannot run here; the message has the remedy
    ├── RendezvousError                  the ranks did not find each other, or found too many or too few
    ├── RankMismatch                     ranks disagree: backend, policy, model, options
    │   └── CollectiveMismatch           ranks issued different collectives (HVDBRIDGE_DEBUG=1)
    ├── WeightError (ValueError)         a weight that is negative, not finite, or set on some ranks only
    ├── StepError                        backward() and step() in an order that loses gradients
    ├── Unsupported (TypeError)          an operation that has no meaning for this tensor, policy or backend
    ├── CollectiveTimeout                a collective took longer than HVDBRIDGE_TIMEOUT_SECONDS
    └── RankFailed                       another rank raised, died or left; the message names it and its cause
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import groupby


class HvdbridgeError(RuntimeError):
    """Base class: ``except HvdbridgeError`` catches whatever this library raises on purpose."""


class ConfigurationError(HvdbridgeError, ValueError):
    """A name, option, environment variable or spec that cannot be meant."""


class SpecError(ConfigurationError):
    """A policy spec string that does not parse; the message marks the position."""


class NotInitialized(HvdbridgeError):
    """``hb.init()`` is missing, or the session was shut down."""


class BackendUnavailable(HvdbridgeError):
    """The chosen backend cannot run here; the message says why and what would work."""


class RendezvousError(HvdbridgeError):
    """The ranks did not find each other, or the library found another number than the launcher."""


class RankMismatch(HvdbridgeError):
    """Ranks disagree about something that must be equal: backend, policy, model, options."""


class CollectiveMismatch(RankMismatch):
    """Ranks issued different collectives; the message names the ranks and both signatures."""


class WeightError(HvdbridgeError, ValueError):
    """A weight that is negative, not finite, or set on some ranks and not on others."""


class StepError(HvdbridgeError):
    """``backward()`` and ``step()`` in an order that would lose or skip gradients."""


class Unsupported(HvdbridgeError, TypeError):
    """An operation that has no meaning for this tensor, policy or backend."""


class CollectiveTimeout(HvdbridgeError):
    """A collective took longer than ``HVDBRIDGE_TIMEOUT_SECONDS``."""


class RankFailed(HvdbridgeError):
    """Another rank raised, died or left; the message names the rank and its cause."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" message: the nearest known name, then all of them.

    >>> nearest("horovd", ["torch", "horovod", "mpi"])
    "Did you mean 'horovod'? Known: horovod, mpi, torch."
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}."


def ranks_text(ranks: Iterable[int]) -> str:
    """Rank numbers for a message.

    >>> ranks_text([3, 0, 1, 2, 5]), ranks_text([4])
    ('ranks 0-3, 5', 'rank 4')
    """
    numbers = sorted(ranks)
    steady = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])  # of neighbours all have one difference
    runs = [[number for _, number in run] for _, run in steady]
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"
