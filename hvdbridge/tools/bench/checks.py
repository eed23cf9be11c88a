"""Checks before anything is measured: numbers out of range, unknown policies, files that cannot be written.

Rules:

1. All ranks come to the same result, or one rank decides for all, so no rank waits for one that has raised an error.
2. A failed check leaves no file behind, and changes no existing file.
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

MAX_VALUE = 1e18
"""The largest time, rate or size. Products of several such values are still finite."""
MOST_RANKS = 10**7
"""A limit on ranks, because a policy may build a list of all ranks to check whether it is defined for that many."""
MOST_STEPS = 10**6
"""A limit on steps, because a job stores several figures per step."""
FIELD_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "str"), "bool": (bool, "bool"), "int": (int, "a whole number"), "float": ((int, float), "a number"),
}  # fmt: skip
"""Annotation of a field -> the types that a file may have there, and their name in error messages."""
POSITIVE_FIELDS = ("step", "compute", "bucket_mb", "bandwidth", "cores")
"""Fields that must be greater than 0; others may be 0."""
DataclassT = TypeVar("DataclassT")


def check_number(what: str, value: float | None, least: float | None = None, most: float = MAX_VALUE) -> None:
    """Check that ``value`` is None, or at most ``most`` and at least ``least`` (None: greater than 0).

    Raises:
        ConfigurationError: ``value`` is out of this range or nan; ``what`` names it in the message.

    >>> check_number("--cores", float("nan"))
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: --cores nan must be positive and at most 1e+18
    """
    if value is not None and not (value >= (1 / MAX_VALUE if least is None else least) and value <= most):
        lower_bound = "be positive" if least is None else f"be at least {least:,}"
        raise ConfigurationError(f"{what} {value} must {lower_bound} and at most {most:,}")


def read(cls: type[DataclassT], saved: Mapping[str, Any], where: str) -> DataclassT:
    """Make a dataclass from the dict that a file has at the path ``where``, checking each field by its annotation.

    Raises:
        ConfigurationError: a field without a default is missing, or a value has a wrong type or is out of range.

    >>> from hvdbridge.tools.bench.transport import AlphaBeta
    >>> read(AlphaBeta, {"latency": 1e-5, "bandwidth": "much"}, "network")
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: network.bandwidth 'much' must be a number
    """
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        what = f"{where}.{field.name}"
        value: Any = saved.get(field.name, field.default)
        name, _, optional = str(field.type).partition(" | ")
        types, text = FIELD_TYPES.get(name, (object, ""))
        if value is MISSING:
            raise ConfigurationError(f"{what} is missing")
        if not (value is None and optional):
            fits = isinstance(value, types) and (name == "bool" or not isinstance(value, bool))
            if not fits:
                raise ConfigurationError(f"{what} {value!r} must be {text}")
            if name == "int":
                check_number(what, value, most=MOST_RANKS)
            elif name == "float":
                check_number(what, value, None if field.name in POSITIVE_FIELDS else 0)
        values[field.name] = value
    return cls(**values)


def check_policies(specs: Sequence[str], models: Iterable[str]) -> None:
    """Check that the specs parse. If one does not, import the modules of ``models`` first: they may register policies.

    Raises:
        ConfigurationError: a policy is unknown, or a module cannot be imported.
    """
    for spec in specs:
        try:
            from_spec(spec)
        except ConfigurationError:
            for model in models:
                import_own(model)
            from_spec(spec)


def check_file(option: str, path: Path | None) -> None:
    """Check that a file can be written. Missing parent folders are made later, together with the file.

    Raises:
        ConfigurationError: the file cannot be written, with the cause.
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
