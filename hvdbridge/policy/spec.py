"""The grammar of policy specs, from text to :class:`Policy` and back.

::

    mean                       a policy with default options
    topk:ratio=0.01,ef=false   options after a colon: the short form, for the outermost policy
    powersgd(rank=4)           options in parentheses: the form that nests
    ef(topk(ratio=0.01))       an inner policy, whose option name (inner=) may be omitted
    warmup(steps=100, then=powersgd(rank=4))
    partition(*.bias=mean, <1024=mean, 1d=fp16, 'odd,name'=mean, rest=bf16)

Rules:

1. The parser evaluates no code. It reads a value as the type that its option declares: ``true``, ``3``, ``1e-4``,
   ``word``, ``'any text'`` (backslash escapes a quote), ``none``, or a policy.
2. Inside parentheses, one option may follow a colon (``ef(topk:ratio=0.01)``): a comma belongs to the outer policy.
3. Every error is a :class:`SpecError` that marks the position. For an unknown name it suggests the nearest known one.
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
from hvdbridge.policy.options import alternatives, choices, describe, is_class, options_of, types_of

WORD = re.compile(r"[A-Za-z0-9_.+\-]+")
KEY = re.compile(r"[<>]=?[0-9]+d?(?=\s*=)|[^\s=,:()'\"]+(?=\s*=)")
QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
QUOTED_KEY = re.compile(rf"(?:{QUOTED.pattern})(?=\s*=)", re.DOTALL)
SPACE = re.compile(r"\s*")
CONSTANTS: dict[Any, dict[str, Any]] = {NoneType: {"none": None}, bool: {"true": True, "false": False}}
MAX_DEPTH = 32


@dataclass
class _Node:
    """A word or a quoted text of the spec. A policy may have options: ``(key, key is quoted, position, value)``."""

    position: int
    text: str
    quoted: bool = False
    options: list[tuple[str | None, bool, int, _Node]] | None = None


@dataclass
class _Reader:
    """Recursive-descent parser of ``text``, from ``position`` on."""

    text: str
    position: int = field(default=0)

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        raise _error(self.text, self.position if position is None else position, message)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Skip spaces, and consume ``pattern`` if the text continues with it."""
        self.position = SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def accept(self, sign: str) -> bool:
        """Consume ``sign`` if it comes next. Returns whether it did."""
        return self.match(re.compile(re.escape(sign))) is not None

    def spec(self) -> _Node:
        """Read the whole text as one policy."""
        node = self.node(depth=0)
        if self.match(re.compile(r".", re.DOTALL)):
            self.fail("this was not expected after the end of the policy", self.position - 1)
        return node

    def node(self, depth: int) -> _Node:
        """Read a value, or a policy with its options."""
        if depth > MAX_DEPTH:
            self.fail(f"nested deeper than {MAX_DEPTH}")
        if quoted := self.match(QUOTED):
            return _Node(quoted.start(), _unquote(quoted), quoted=True)
        word = self.match(WORD)
        if word is None:
            self.fail("a name or a value is missing here")
        node = _Node(word.start(), word.group())
        if self.accept("("):
            node.options = []
            if not self.accept(")"):
                node.options.extend(self.options(depth))
                if not self.accept(")"):
                    self.fail("',' or ')' is missing here")
        elif self.accept(":"):
            node.options = [self.option(depth)] if depth else list(self.options(depth))
        return node

    def options(self, depth: int) -> Iterator[tuple[str | None, bool, int, _Node]]:
        """Read options that commas separate."""
        yield self.option(depth)
        while self.accept(","):
            yield self.option(depth)

    def option(self, depth: int) -> tuple[str | None, bool, int, _Node]:
        """Read ``key=value``, or an inner policy without a key."""
        if quoted := self.match(QUOTED_KEY):
            key, start = _unquote(quoted), quoted.start()
        elif bare := self.match(KEY):
            key, start = bare.group(), bare.start()
        else:
            node = self.node(depth + 1)
            return None, False, node.position, node
        self.accept("=")
        return key, quoted is not None, start, self.node(depth + 1)


def parse(text: str, lookup: Callable[[str], type[Policy]]) -> Policy:
    """Return the policy that ``text`` describes. ``lookup(name)`` returns the policy class of that name.

    Raises:
        SpecError: the text does not parse, a policy or option is unknown, or a value is not valid.
    """
    return _build(text, _Reader(text).spec(), lookup)


def unparse(policy: Policy, name_of: Callable[[type[Policy]], str]) -> str:
    """Return the shortest text that :func:`parse` reads as ``policy``. Options with their default values are omitted.

    Raises:
        ConfigurationError: a policy class is not registered.
    """
    name, options = name_of(type(policy)), _options(policy, name_of)
    if options and not any(isinstance(getattr(policy, option), Policy) for option in options_of(type(policy))):
        return f"{name}:{','.join(options)}"
    return _join(name, options)


def _build(text: str, node: _Node, lookup: Callable[[str], type[Policy]]) -> Policy:
    """Return the policy of ``node``, which has been read from ``text``."""
    if node.quoted:
        raise _error(text, node.position, "a policy is expected here; its name is not quoted")
    try:
        cls = lookup(node.text)
    except ConfigurationError as error:
        raise _error(text, node.position, str(error)) from error
    options, types = options_of(cls), types_of(cls)
    collector = next((f.name for f in options.values() if "collects" in f.metadata), None)
    named = [name for name in options if name != collector]
    given: dict[str, Any] = {}
    collected: list[tuple[str, Policy]] = []
    for key, quoted, position, value in node.options or ():
        if key is None:
            key = next((n for n in named if n not in given and _takes_policy(types[n])), None)
            if key is None:
                raise _error(text, position, f"{node.text} takes no further policy; write option=value")
        elif collector and (quoted or key not in named):
            collected.append((key, _build(text, value, lookup)))
            continue
        elif key not in named or quoted:
            hint = nearest(key, named) if named else "It has none."
            raise _error(text, position, f"{node.text} has no option {key!r}. {hint}")
        if key in given:
            raise _error(text, position, f"{key} is given twice")
        given[key] = _value(text, value, f"{node.text}: {key}", types[key], lookup)
    if collector:
        given[collector] = tuple(collected)
    for name in named:
        required = options[name].default is MISSING and options[name].default_factory is MISSING
        if required and name not in given:
            example = f"{node.text}(mean)" if _takes_policy(types[name]) else f"{node.text}:{name}=..."
            raise _error(text, node.position, f"{node.text} needs {name}, as in {example}")
    try:
        return cls(**given)
    except ConfigurationError as error:
        raise _error(text, node.position, str(error)) from error


def _value(text: str, node: _Node, where: str, wanted: Any, lookup: Callable[[str], type[Policy]]) -> Any:
    """Return the value of ``node`` as the type ``wanted``. ``where`` names policy and option in errors."""
    if _takes_policy(wanted):
        if NoneType in alternatives(wanted) and node.text == "none":
            return None
        return _build(text, node, lookup)
    if node.options is not None:
        raise _error(text, node.position, f"{where} is {describe(wanted)}, not a policy")
    if choices(wanted):
        if node.text in choices(wanted):
            return node.text
        raise _error(text, node.position, f"{where} must be {describe(wanted)}. {nearest(node.text, choices(wanted))}")
    for kind in alternatives(wanted):
        if kind is str and (node.quoted or kind == wanted or node.text != "none"):
            return node.text
        if not node.quoted and node.text in CONSTANTS.get(kind, ()):
            return CONSTANTS[kind][node.text]
        if not node.quoted and kind in (int, float):
            with suppress(ValueError):
                return kind(node.text)
    raise _error(text, node.position, f"{where} must be {describe(wanted)}, got {node.text!r}")


def _takes_policy(wanted: Any) -> bool:
    """Return whether an option of type ``wanted`` accepts a policy."""
    return any(is_class(kind) and issubclass(kind, Policy) for kind in alternatives(wanted))


def _join(name: str, options: list[str]) -> str:
    return f"{name}({', '.join(options)})" if options else name


def _options(policy: Policy, name_of: Callable[[type[Policy]], str]) -> list[str]:
    """Return the text of each option that differs from its default."""

    def show(inner: Policy) -> str:
        return _join(name_of(type(inner)), _options(inner, name_of))

    options, texts = options_of(type(policy)), []
    for name, option in options.items():
        value = getattr(policy, name)
        if "collects" in option.metadata:
            texts += [f"{_key(key, options)}={show(inner)}" for key, inner in value]
        elif option.default is MISSING or value != option.default:
            value_text = show(value) if isinstance(value, Policy) else _scalar(value)
            texts.append(value_text if name == "inner" else f"{name}={value_text}")
    return texts


def _scalar(value: Any) -> str:
    """Return the text of a value that is not a policy."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and (value == "none" or not WORD.fullmatch(value)):
        return _quote(value)
    return str(value)


def _key(key: str, options: dict[str, Any]) -> str:
    """Return the text of a rule's key, quoted if it would be read as another token or an option."""
    bare = KEY.match(key + "=")
    return key if bare and bare.group() == key and key not in options else _quote(key)


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _unquote(match: re.Match[str]) -> str:
    content = match[1] if match[1] is not None else match[2]
    return re.sub(r"\\(.)", r"\1", content, flags=re.DOTALL)


def _error(text: str, position: int, message: str) -> SpecError:
    """Return an error with ``message`` and a mark below ``text`` at ``position``."""
    if message.endswith("^"):  # the error of an inner policy marks its position already
        return SpecError(message)
    printable = "".join(c if c.isprintable() else " " for c in text)
    return SpecError(f"{message}\n  {printable}\n  {' ' * position}^")
