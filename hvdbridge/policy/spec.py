"""The grammar of policy specs, from text to :class:`Policy` and back.

::

    mean                       a policy with its defaults
    topk:ratio=0.01,seed=3     options after a colon; the plain form of the outermost policy
    powersgd(rank=4)           options in parentheses; the form that nests
    ef(topk(ratio=0.01))       an inner policy may stand without its name
    warmup(steps=100, then=powersgd(rank=4))
    partition(*.bias=mean, <1024=mean, 1d=fp16, 'odd,name'=mean, rest=bf16)

Rules:

1. Nothing is evaluated. A value is read as the type that its option declares: ``true``, ``3``, ``1e-4``,
   ``word``, ``'any text'`` (backslash escapes a quote), ``none``, or a policy.
2. Inside parentheses a colon takes one option (``ef(topk:ratio=0.01)``): the comma belongs to the outer one.
3. Every failure is a :class:`SpecError` that marks the position; unknown names suggest the nearest.
4. ``parse(unparse(policy)) == policy``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from types import NoneType
from typing import Any, NoReturn

from hvdbridge.errors import ConfigurationError, SpecError, nearest
from hvdbridge.policy.base import Policy
from hvdbridge.policy.options import alternatives, choices, describe, options_of, types_of

WORD = re.compile(r"[A-Za-z0-9_.+\-]+")
KEY = re.compile(r"[<>]=?[0-9]+d?(?=\s*=)|[^\s=,:()'\"]+(?=\s*=)")
QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
QUOTED_KEY = re.compile(rf"(?:{QUOTED.pattern})(?=\s*=)", re.DOTALL)
SPACE = re.compile(r"\s*")
WORDS: dict[Any, dict[str, Any]] = {NoneType: {"none": None}, bool: {"true": True, "false": False}}
DEEPEST = 32


@dataclass
class _Node:
    """A word or a quoted text; with options where it is a policy: ``(key, key is quoted, position, value)``."""

    at: int
    text: str
    quoted: bool = False
    options: list[tuple[str | None, bool, int, _Node]] | None = None


@dataclass
class _Reader:
    text: str
    at: int = field(default=0)

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise _error(self.text, self.at if at is None else at, message)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def sign(self, sign: str) -> bool:
        return self.match(re.compile(re.escape(sign))) is not None

    def whole(self) -> _Node:
        node = self.node(depth=0)
        if self.match(re.compile(r".", re.DOTALL)):
            self.fail("this was not expected after the end of the policy", self.at - 1)
        return node

    def node(self, depth: int) -> _Node:
        if depth > DEEPEST:
            self.fail(f"nested deeper than {DEEPEST}")
        if quoted := self.match(QUOTED):
            return _Node(quoted.start(), _unquote(quoted), quoted=True)
        word = self.match(WORD)
        if word is None:
            self.fail("a name or a value is missing here")
        node = _Node(word.start(), word.group())
        if self.sign("("):
            node.options = []
            if not self.sign(")"):
                node.options.extend(self.several(depth))
                if not self.sign(")"):
                    self.fail("',' or ')' is missing here")
        elif self.sign(":"):
            node.options = [self.option(depth)] if depth else list(self.several(depth))
        return node

    def several(self, depth: int) -> Iterator[tuple[str | None, bool, int, _Node]]:
        yield self.option(depth)
        while self.sign(","):
            yield self.option(depth)

    def option(self, depth: int) -> tuple[str | None, bool, int, _Node]:
        if quoted := self.match(QUOTED_KEY):
            key, start = _unquote(quoted), quoted.start()
        elif bare := self.match(KEY):
            key, start = bare.group(), bare.start()
        else:
            node = self.node(depth + 1)
            return None, False, node.at, node
        self.sign("=")
        return key, quoted is not None, start, self.node(depth + 1)


def parse(text: str, lookup: Callable[[str], type[Policy]]) -> Policy:
    """The policy that ``text`` describes; ``lookup`` finds a policy class by its name.

    Raises:
        SpecError: the text does not parse, or names an unknown policy or option, or an impossible value.
    """
    return _build(text, _Reader(text).whole(), lookup)


def unparse(policy: Policy, name_of: Callable[[type[Policy]], str]) -> str:
    """The shortest text that :func:`parse` reads as ``policy``; defaults are left out.

    Raises:
        ConfigurationError: a policy class has no registered name.
    """
    name, options = name_of(type(policy)), _options(policy, name_of)
    if options and not any(isinstance(getattr(policy, option), Policy) for option in options_of(type(policy))):
        return f"{name}:{','.join(options)}"
    return _join(name, options)


def _build(text: str, node: _Node, lookup: Callable[[str], type[Policy]]) -> Policy:
    if node.quoted:
        raise _error(text, node.at, "a policy is expected here; its name is not quoted")
    try:
        cls = lookup(node.text)
    except ConfigurationError as error:
        raise _error(text, node.at, str(error)) from error
    options, types = options_of(cls), types_of(cls)
    collecting = next((f.name for f in options.values() if "collects" in f.metadata), None)
    named = [name for name in options if name != collecting]
    given: dict[str, Any] = {}
    collected: list[tuple[str, Policy]] = []
    for key, quoted, at, value in node.options or ():
        if key is None:
            key = next((n for n in named if n not in given and _takes_policy(types[n])), None)
            if key is None:
                raise _error(text, at, f"{node.text} takes no further policy; write option=value")
        elif collecting and (quoted or key not in named):
            collected.append((key, _build(text, value, lookup)))
            continue
        elif key not in named or quoted:
            hint = nearest(key, named) if named else "It has none."
            raise _error(text, at, f"{node.text} has no option {key!r}. {hint}")
        if key in given:
            raise _error(text, at, f"{key} is given twice")
        given[key] = _value(text, value, f"{node.text}: {key}", types[key], lookup)
    if collecting:
        given[collecting] = tuple(collected)
    for name in named:
        required = options[name].default is MISSING and options[name].default_factory is MISSING
        if required and name not in given:
            example = f"{node.text}(mean)" if _takes_policy(types[name]) else f"{node.text}:{name}=..."
            raise _error(text, node.at, f"{node.text} needs {name}, as in {example}")
    try:
        return cls(**given)
    except ConfigurationError as error:
        raise _error(text, node.at, str(error)) from error


def _value(text: str, node: _Node, where: str, wanted: Any, lookup: Callable[[str], type[Policy]]) -> Any:
    """``node`` read as the type ``wanted``."""
    if _takes_policy(wanted):
        if NoneType in alternatives(wanted) and node.text == "none":
            return None
        return _build(text, node, lookup)
    if node.options is not None:
        raise _error(text, node.at, f"{where} is {describe(wanted)}, not a policy")
    if choices(wanted):
        if node.text in choices(wanted):
            return node.text
        raise _error(text, node.at, f"{where} must be {describe(wanted)}. {nearest(node.text, choices(wanted))}")
    for kind in alternatives(wanted):
        if kind is str and (node.quoted or kind == wanted or node.text != "none"):
            return node.text
        if not node.quoted and node.text in WORDS.get(kind, ()):
            return WORDS[kind][node.text]
        if not node.quoted and kind in (int, float):
            with suppress(ValueError):
                return kind(node.text)
    raise _error(text, node.at, f"{where} must be {describe(wanted)}, got {node.text!r}")


def _takes_policy(wanted: Any) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, Policy) for kind in alternatives(wanted))


def _join(name: str, options: list[str]) -> str:
    return f"{name}({', '.join(options)})" if options else name


def _options(policy: Policy, name_of: Callable[[type[Policy]], str]) -> list[str]:
    """The options that are no defaults, as they are written."""

    def show(inner: Policy) -> str:
        return _join(name_of(type(inner)), _options(inner, name_of))

    options, parts = options_of(type(policy)), []
    for name, option in options.items():
        value = getattr(policy, name)
        if "collects" in option.metadata:
            parts += [f"{_key(key, options)}={show(inner)}" for key, inner in value]
        elif option.default is MISSING or value != option.default:
            shown = show(value) if isinstance(value, Policy) else _scalar(value)
            parts.append(shown if name == "inner" else f"{name}={shown}")
    return parts


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and (value == "none" or not WORD.fullmatch(value)):
        return _quote(value)
    return str(value)


def _key(key: str, options: dict[str, Any]) -> str:
    bare = KEY.match(key + "=")
    return key if bare and bare.group() == key and key not in options else _quote(key)


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _unquote(found: re.Match[str]) -> str:
    inner = found[1] if found[1] is not None else found[2]
    return re.sub(r"\\(.)", r"\1", inner, flags=re.DOTALL)


def _error(text: str, at: int, message: str) -> SpecError:
    if message.endswith("^"):  # an inner policy's error is marked already
        return SpecError(message)
    shown = "".join(c if c.isprintable() else " " for c in text)
    return SpecError(f"{message}\n  {shown}\n  {' ' * at}^")
