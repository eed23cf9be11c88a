"""Hooks of MkDocs: links from a page to files of the repository outside of docs/.

On GitHub such a link (``../../examples/train.py``) leads to the file. The site gets a copy of the file below
``repository/``, and the link leads there; a link to a folder becomes the folder's name. A missing target is a warning,
and so an error in a strict build.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.utils import get_relative_url

LOG = logging.getLogger("mkdocs.hooks.repository")
COPIES = "repository"
FENCE = re.compile(r"^ *(`{3,})[^\n]*\n.*?^ *\1`* *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>(?!\w+:)[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add a copy of each file outside of docs/ that a page links to."""
    found = {path for page in files.documentation_pages() for _, path in outside(page, page.content_string, config)}
    for path in sorted(found):
        if path.is_file():
            place, inclusion = copy_of(path, root(config)), InclusionLevel.INCLUDED
            files.append(File.generated(config, place, abs_src_path=str(path), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to such files into links to their copies."""
    targets = dict(outside(page.file, markdown, config))

    def replaced(match: re.Match[str]) -> str:
        path = targets.get(match["target"])
        if path is None:
            return match[0]
        name = path.relative_to(root(config))
        if not path.exists():
            LOG.warning(f"{page.file.src_uri} links to {match['target']}, and the repository has no {name}")
        if not path.is_file():
            return f"{match['text']} (`{name}/`)"
        link = get_relative_url(copy_of(path, root(config)), page.file.src_uri)
        return f"[{match['text']}]({link})"

    return beside_code(markdown, lambda text: LINK.sub(replaced, text))


def outside(page: File, markdown: str, config: Any) -> Iterator[tuple[str, Path]]:
    """Yield the target of each link that leaves docs/, and the path it leads to."""
    docs = Path(config.docs_dir)
    texts: list[str] = []
    beside_code(markdown, lambda text: texts.append(text) or text)
    for match in LINK.finditer("\n".join(texts)):
        path = (docs / page.src_uri).parent.joinpath(match["target"]).resolve()
        if match["target"] and not path.is_relative_to(docs) and path.is_relative_to(root(config)):
            yield match["target"], path


def root(config: Any) -> Path:
    return Path(config.config_file_path).parent


def copy_of(path: Path, repository: Path) -> str:
    """Return the place of a file's copy; Markdown is copied as text, as its links are made for the repository."""
    name = f"{COPIES}/{path.relative_to(repository)}"
    return f"{name}.txt" if path.suffix == ".md" else name


def beside_code(markdown: str, change: Any) -> str:
    """Apply ``change`` to the text between fenced blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])
