"""Options of policies: typed dataclass fields with limits, which the constructor checks.

Rules:

1. The type of an option is int, float, bool, str, a ``Literal`` or a policy, or one of these or None.
2. A value of another type or beyond its limits raises at construction. The error names the limits.
3. An int is valid as a float. A bool is valid as neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from operator import ge, gt, le, lt
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hvdbridge.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class Limits:
    """The interval of a numeric option. None means no limit on that side. No interval contains NaN.

    >>> str(Limits(above=0, at_most=1)), Limits(above=0).allow(0.0)
    ('> 0 and <= 1', False)
    """

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def allow(self, value: float) -> bool:
        """Return whether ``value`` is in the interval."""
        return not math.isnan(value) and all(holds(value, bound) for _, holds, bound in self._bounds())

    def __str__(self) -> str:
        return " and ".join(f"{sign} {bound:g}" for sign, _, bound in self._bounds())

    def _bounds(self) -> Iterator[tuple[str, Callable[[float, float], bool], float]]:
        for sign, holds, bound in (
            (">", gt, self.above), (">=", ge, self.at_least), ("<", lt, self.below), ("<=", le, self.at_most),
        ):  # fmt: skip
            if bound is not None:
                yield sign, holds, bound


def option(default: Any, **limits: float) -> Any:
    """Return a dataclass field with :class:`Limits`: ``ratio: float = option(0.01, above=0, at_most=1)``."""
    return field(default=default, metadata={"limits": Limits(**limits)})


def options_of(cls: type[Any]) -> dict[str, Field[Any]]:
    """Return the options of a policy class by name, in order; empty if the class is not a dataclass."""
    return {f.name: f for f in fields(cls) if f.init} if is_dataclass(cls) else {}


def types_of(cls: type[Any]) -> dict[str, Any]:
    """Return the resolved type of each option of a policy class, by name."""
    hints = get_type_hints(cls)
    return {name: hints[name] for name in options_of(cls)}


def check(policy: Any) -> None:
    """Check the options of ``policy`` against their types and limits.

    Raises:
        ConfigurationError: an option is not valid. The message names policy, option, value and the valid values.
    """
    for name, wanted in types_of(type(policy)).items():
        value = getattr(policy, name)
        where = f"{type(policy).__name__}: {name}={value!r}"
        if not _fits(value, wanted):
            hint = f" {nearest(value, choices(wanted))}" if isinstance(value, str) and choices(wanted) else ""
            raise ConfigurationError(f"{where} must be {describe(wanted)}.{hint}")
        limits = options_of(type(policy))[name].metadata.get("limits")
        if limits is not None and value is not None and not limits.allow(value):
            raise ConfigurationError(f"{where} must be {limits}")


def choices(wanted: Any) -> tuple[Any, ...]:
    """Return the values of a ``Literal``; empty for other types."""
    return get_args(wanted) if get_origin(wanted) is Literal else ()


def alternatives(wanted: Any) -> tuple[Any, ...]:
    """Return the members of a union (``X | None`` -> ``(X, NoneType)``); another type gives a tuple of itself."""
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


def is_class(kind: Any) -> bool:
    """Return whether a type is a class. In Python 3.10 ``tuple[int]`` is an instance of ``type``, but no class.

    >>> is_class(int), is_class(tuple[int])
    (True, False)
    """
    return isinstance(kind, type) and get_origin(kind) is None


def describe(wanted: Any) -> str:
    """Return a type in words, for messages.

    >>> describe(float), describe(int | None), describe(Literal["a", "b"])
    ('a number', 'an integer or none', "one of 'a', 'b'")
    """
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text", NoneType: "none"}
    if choices(wanted):
        return f"one of {', '.join(map(repr, choices(wanted)))}"
    return " or ".join(names.get(t) or f"a {t.__name__.lower()}" for t in alternatives(wanted))


def _fits(value: object, wanted: Any) -> bool:
    """Return whether ``value`` is of the type ``wanted`` (rules 1 and 3)."""
    if choices(wanted):
        return value in choices(wanted)
    for kind in alternatives(wanted):
        if not is_class(kind):  # tuple[...] and similar types, which the policy checks itself
            return True
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
            return True
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return True
    return False
