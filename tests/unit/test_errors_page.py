"""The pages on errors quote messages that the source has, and docs/reference/errors.md has all of most classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hvdbridge import errors

ROOT = Path(__file__).parents[2]
ERRORS, TROUBLESHOOTING = ROOT / "docs/reference/errors.md", ROOT / "docs/how-to/troubleshooting.md"
PLACEHOLDER = "\0"
FORMAT = re.compile(r"%[.\d]*[sdfgr]")
"""What logging fills in."""
COMPLETE = (
    "NotInitialized", "BackendUnavailable", "RendezvousError", "RankMismatch", "CollectiveMismatch", "WeightError",
    "StepError", "CollectiveTimeout", "RankFailed",
)  # fmt: skip
"""Classes of which errors.md has every message; of the others it has the most frequent ones."""


def text_of(node: ast.expr) -> str:
    """Return a message's text, with a placeholder for each part that only the running program knows."""
    match node:
        case ast.Constant(value=str(text)):
            return FORMAT.sub(PLACEHOLDER, text)
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.Call(func=ast.Attribute(value=value, attr="rstrip" | "join")):
            return text_of(value)
    return PLACEHOLDER


@cache
def expressions() -> list[tuple[Path, ast.expr]]:
    """Return all expressions of the source, each with its file."""
    files = sorted((ROOT / "hvdbridge").rglob("*.py"))
    return [(f, node) for f in files for node in ast.walk(ast.parse(f.read_text())) if isinstance(node, ast.expr)]


@cache
def templates() -> frozenset[str]:
    """Return the texts of the source that a message may be."""
    return frozenset(text for _, node in expressions() if " " in (text := text_of(node)))


def occurs(quote: str, template: str) -> bool:
    """Return whether ``template`` has the quoted message; ``...`` covers a placeholder and any text around it.

    >>> occurs("rank ... has", f"the rank {PLACEHOLDER} has"), occurs("rank ... has", "rank 1 has")
    (True, False)
    """
    first, *others = quote.split("...")
    if first not in template:
        return False
    end = template.index(first) + len(first)
    for part in others:
        if (placeholder := template.find(PLACEHOLDER, end)) < 0 or (start := template.find(part, placeholder + 1)) < 0:
            return False
        end = start + len(part)
    return True


def quotes(page: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, section and text of each message that a page quotes: a heading, or a table's first column, that is
    code and nothing else; in errors.md's first table these are classes."""
    section = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if heading := re.fullmatch(r"## (.*)", line):
            section = heading[1]
        if quote := re.match(r"(?:\| |#{3,} )`(.+?)`(?: \||$)", line):
            yield number, section, quote[1]


def all_quotes() -> list[tuple[Path, int, str, str]]:
    return [(page, *quote) for page in (ERRORS, TROUBLESHOOTING) for quote in quotes(page)]


def test_each_message_that_a_page_quotes_is_in_the_source() -> None:
    found = all_quotes()
    assert {page for page, *_ in found} == {ERRORS, TROUBLESHOOTING}
    absent = [
        f"{page.relative_to(ROOT)}:{line}: {quote}"
        for page, line, _, quote in found
        if not any(occurs(quote, template) for template in templates())
    ]
    assert not absent, "\n".join(absent)


def raised(name: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of each error of class ``name`` that the source makes."""
    for path, node in expressions():
        if isinstance(node, ast.Call) and node.args:
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called == name:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text_of(node.args[0])


@pytest.mark.parametrize("name", COMPLETE)
def test_the_page_has_every_message_of_a_class(name: str) -> None:
    listed = [quote for _, section, quote in quotes(ERRORS) if section == name]
    sites = list(raised(name))
    assert sites
    absent = [
        f"{place}: {text}"
        for place, text in sites
        if len(re.findall("[A-Za-z]", text)) >= 12  # else the text comes from elsewhere
        and not any(occurs(quote, text) for quote in listed)
    ]
    assert not absent, "\n".join(absent).replace(PLACEHOLDER, "...")


def test_the_page_has_every_class() -> None:
    kinds = {name for name, kind in vars(errors).items() if getattr(kind, "__module__", "") == errors.__name__}
    kinds = {name for name in kinds if name[0].isupper()}  # without functions
    sections = set(re.findall(r"^## (\w+)(?: itself)?$", ERRORS.read_text(), re.MULTILINE))
    assert kinds == sections


@pytest.mark.parametrize(
    ("quote", "found"),
    [
        ("rank ... waited ... s for rank 0's answer", True),
        ("rank 0 waited ... s for rank 0's answer", False),
        ("rank ... has waited ... s for rank 0's answer", False),
        ("died without a word", True),
        ("died without any word", False),
        ("call hb.init() first ...", False),  # nothing is filled in there
    ],
)
def test_a_changed_message_is_noticed(quote: str, found: bool) -> None:
    assert any(occurs(quote, template) for template in templates()) is found
