"""Extension of Griffe, which reads the code for the API's reference: docstrings become Markdown (``markup.py``)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from markup import markdown


class Docstrings(griffe.Extension):
    """Rewrite each docstring when its object has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
