"""What is refused before anything is measured: numbers that cannot be, unknown policies, files that cannot be written.

Rules:

1. All ranks decide alike, or one decides for all: none waits for another that has refused.
2. A refusal leaves nothing behind, and nothing that was there is touched.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies import from_spec
from hvdbridge.tools.bench.models import import_own

LARGEST = 1e18
"""No time, rate or size goes beyond: products of several are finite, then."""
MOST_RANKS = 10**7
"""Policies may make a list of all when they are asked whether they are defined for so many."""
MOST_STEPS = 10**6
"""A job keeps some figures of each."""


def check_number(what: str, value: float | None, least: float | None = None, most: float = LARGEST) -> None:
    """A number above 0, or from ``least`` on, up to ``most``; None is nobody's.

    Raises:
        ConfigurationError: it is not; nan never is.

    >>> check_number("--cores", float("nan"))
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: --cores nan must be positive and at most 1e+18
    """
    if value is None:
        return
    if not (value >= (1 / LARGEST if least is None else least) and value <= most):
        low = "be positive" if least is None else f"be at least {least:,}"
        raise ConfigurationError(f"{what} {value} must {low} and at most {most:,}")


def number(saved: Mapping[str, Any], where: str, name: str, least: float | None = None, most: float = LARGEST) -> Any:
    """The number of that name in what a file had at ``where``; a whole one, where ``most`` is.

    Raises:
        ConfigurationError: it is missing, no such number, or what :func:`check_number` refuses.

    >>> number({"ranks": "2"}, "rows[0]", "ranks", most=MOST_RANKS)
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: rows[0].ranks '2' must be a whole number
    """
    if name not in saved:
        raise ConfigurationError(f"{where}.{name} is missing")
    value = saved[name]
    whole = isinstance(most, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ConfigurationError(f"{where}.{name} {value!r} must be a {'whole ' if whole else ''}number")
    check_number(f"{where}.{name}", value, least, most)
    return value


def check_policies(specs: Sequence[str], models: Iterable[str]) -> None:
    """A slip of the pen is told at once. Where ours are not enough, the user's own modules are imported: a file that
    makes a model may register a policy.

    Raises:
        ConfigurationError: nobody knows such a policy, or a module cannot be imported.
    """
    for spec in specs:
        try:
            from_spec(spec)
        except ConfigurationError:
            for model in models:
                import_own(model)
            from_spec(spec)


def check_file(option: str, path: Path | None) -> None:
    """Whether a file can be written, in folders that are made when it is.

    Raises:
        ConfigurationError: it cannot, and why.
    """
    if path is None:
        return
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    with ExitStack() as stack:
        for folder in reversed(made):
            stack.callback(_removed, folder)
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # /dev/stdout
                path.open("a").close()
            else:
                TemporaryFile(dir=path.resolve().parent).close()
        except OSError as error:
            raise ConfigurationError(f"{option} {path} cannot be written: {error}") from error


def _removed(folder: Path) -> None:
    if folder.exists():
        folder.rmdir()
