"""Extension of Griffe, which reads the code for the API's reference.

Docstrings become Markdown (``markup.py``). A policy's option shows its default in place of the call ``option(...)``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from markup import markdown, one_by_one


class Docstrings(griffe.Extension):
    """Rewrite each docstring and default when its object has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = one_by_one(markdown(obj.docstring.value))

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "option":
            attr.value = value.arguments[0]
