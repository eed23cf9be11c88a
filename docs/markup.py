"""Docstrings as Markdown: roles, double backticks, literal blocks and examples of reStructuredText.

Used by the API's reference (``docstrings.py``) and by the generated pages (``generate.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`([^`]+)`", re.DOTALL)
LITERAL = re.compile(r"(?<!`)``(?!`)(.+?)``(?!`)", re.DOTALL)
SEVERAL = re.compile(
    r"^(?P<indent> +)(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)+): (?P<text>.*\n?(?:(?P=indent) +.*\n?)*)",
    re.MULTILINE,
)
EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*\n?(?:(?P=indent).*\S.*\n?)*", re.MULTILINE)
COMMANDS = ("torchrun ", "hvdbridge ", "python ")
BLOCK = re.compile(r"^(?P<indent> *)(?P<lead>[^\n]*?)::\n\n(?P<text>(?:(?P=indent) +[^\n]*\n|\n)+)", re.MULTILINE)


def markdown(text: str, link: Callable[[str], str | None] = lambda target: None) -> str:
    """Return a docstring, or a part of one, as Markdown.

    Args:
        link: returns the address of what a role names (``hvdbridge.Policy``), or None for plain code.

    >>> markdown("A :class:`~hvdbridge.Policy` of ``g / N``::" + chr(10) * 2 + "    x = 1" + chr(10))
    'A `Policy` of `g / N`:\\n\\n```python\\nx = 1\\n```\\n'
    """

    def role(match: re.Match[str]) -> str:
        title, _, named = match[1].partition(" <")
        if named:
            return f"`{title}`"
        target = match[1].lstrip("~.!")
        short = target.rpartition(".")[2] if match[1].startswith("~") else target.removeprefix("hvdbridge.")
        address = link(target)
        return f"[`{short}`][{address}]" if address else f"`{short}`"

    def block(match: re.Match[str]) -> str:
        lines = match["text"].rstrip().splitlines()
        depth = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        indent, lead = match["indent"], match["lead"].rstrip()
        opening = f"{indent}{lead}:\n\n" if lead else ""
        code = [line[depth:] for line in lines]
        body = "\n".join(f"{indent}{line}".rstrip() for line in code)
        return f"{opening}{indent}```{language(code)}\n{body}\n{indent}```\n\n"

    def language(code: list[str]) -> str:
        try:
            compile("\n".join(code), "docstring", "exec")
        except SyntaxError:
            return "bash" if code[0].startswith(COMMANDS) else "text"
        return "python"

    def example(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"

    text = EXAMPLE.sub(example, text)
    text = BLOCK.sub(block, text + "\n").rstrip("\n") + "\n" * text.endswith("\n")
    return LITERAL.sub(r"`\1`", ROLE.sub(role, text))


def one_by_one(text: str) -> str:
    """Give each of several parameters that share an entry (``rank, size: ...``) an entry of its own.

    >>> one_by_one("Args:" + chr(10) + "    a, b: numbers.")
    'Args:\\n    a: numbers.\\n    b: numbers.'
    """

    def entries(match: re.Match[str]) -> str:
        texts = (f"{match['indent']}{name}: {match['text']}" for name in match["names"].split(", "))
        return "\n".join(text.rstrip("\n") for text in texts) + "\n" * match["text"].endswith("\n")

    return SEVERAL.sub(entries, text)
