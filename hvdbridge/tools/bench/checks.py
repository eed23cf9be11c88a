"""What is refused before anything is measured: numbers that cannot be, unknown policies, files that cannot be written.

Rules:

1. All ranks decide alike, or one decides for all: none waits for another that has refused.
2. A refusal leaves nothing behind, and nothing that was there is touched.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies import from_spec
from hvdbridge.tools.bench.models import import_own

LARGEST = 1e18
"""The largest time, rate or size: products of several are finite, then."""
MOST_RANKS = 10**7
"""Policies may make a list of all when they are asked whether they are defined for so many."""
MOST_STEPS = 10**6
"""A job keeps some figures of each."""
TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "str"), "bool": (bool, "bool"), "int": (int, "a whole number"), "float": ((int, float), "a number"),
}  # fmt: skip
"""Annotation of a field -> the types that a file may have there, and how a message names them."""
POSITIVE = ("step", "compute", "bucket_mb", "bandwidth", "cores")
"""Fields that must not be 0."""
Kind = TypeVar("Kind")


def check_number(what: str, value: float | None, least: float | None = None, most: float = LARGEST) -> None:
    """Accept None, and a number above 0, or from ``least`` on, up to ``most``.

    Raises:
        ConfigurationError: the number is another one, or nan.

    >>> check_number("--cores", float("nan"))
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: --cores nan must be positive and at most 1e+18
    """
    if value is not None and not (value >= (1 / LARGEST if least is None else least) and value <= most):
        low = "be positive" if least is None else f"be at least {least:,}"
        raise ConfigurationError(f"{what} {value} must {low} and at most {most:,}")


def read(kind: type[Kind], saved: Mapping[str, Any], where: str) -> Kind:
    """A dataclass from what a file has at ``where``, each field checked by its annotation.

    Raises:
        ConfigurationError: a field without a default is missing, or a value cannot be.

    >>> from hvdbridge.tools.bench.transport import Line
    >>> read(Line, {"latency": 1e-5, "bandwidth": "much"}, "network")
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: network.bandwidth 'much' must be a number
    """
    found = {}
    for field in fields(kind):  # type: ignore[arg-type]
        what = f"{where}.{field.name}"
        value: Any = saved.get(field.name, field.default)
        name, _, optional = str(field.type).partition(" | ")
        types, text = TYPES.get(name, (object, ""))
        if value is MISSING:
            raise ConfigurationError(f"{what} is missing")
        if not (value is None and optional):
            fits = isinstance(value, types) and (name == "bool" or not isinstance(value, bool))
            if not fits:
                raise ConfigurationError(f"{what} {value!r} must be {text}")
            if name == "int":
                check_number(what, value, most=MOST_RANKS)
            elif name == "float":
                check_number(what, value, None if field.name in POSITIVE else 0)
        found[field.name] = value
    return kind(**found)


def check_policies(specs: Sequence[str], models: Iterable[str]) -> None:
    """Parse the specs. Where a name is unknown, import the users' modules first: they may register policies.

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
    """Look whether a file can be written; folders that it lacks are made later, with the file.

    Raises:
        ConfigurationError: the file cannot be written, and why.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and not path.is_file():  # /dev/stdout
            path.open("a").close()
        else:
            TemporaryFile(dir=next(folder for folder in path.resolve().parents if folder.exists())).close()
    except OSError as error:
        raise ConfigurationError(f"{option} {path} cannot be written: {error}") from error
