"""Fenced blocks of the documents, as markdown-it reads them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.unit.test_docs import PAGES
from tests.unit.test_layering import ROOT

NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*")
"""What stands right before a block that nobody runs: why."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its location, language and text, and the reason if it is not run."""

    page: str
    section: str
    line: int
    kind: str
    text: str
    reason: str

    @property
    def location(self) -> str:
        """Page and line, in the form that editors take."""
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield all blocks of a page, those within lists as well."""
    section = ""
    previous_token = None
    for token in MarkdownIt("commonmark").parse(text):
        if previous_token is not None and (previous_token.type, previous_token.tag) == ("heading_open", "h2"):
            section = token.content
        if token.type in ("fence", "code_block"):
            is_comment = previous_token is not None and previous_token.type == "html_block"
            reason_match = NOT_RUN.fullmatch(previous_token.content) if previous_token and is_comment else None
            line = token.map[0] + 1 if token.map else 0
            yield Block(page, section, line, token.info.strip(), token.content, reason_match[1] if reason_match else "")
        previous_token = token


def of_page(page: Path) -> list[Block]:
    """Return the blocks of a file of this repository."""
    return list(blocks(str(page.relative_to(ROOT)), page.read_text()))


LIBRARIES = {
    "classifiers": ("classifiers.md", ("Numbers", "Import from a shell, run it and ask", "Texts")),
    "lightfm": ("vectors.md", ("Models of LightFM",)),
    "rectools": ("vectors.md", ("Models of RecTools",)),
    "recbole": ("torch.md", ("Models of RecBole",)),
    "torch-rechub": ("torch.md", ("Two towers of torch-rechub",)),
    "sentence-transformers": ("torch.md", ("Texts by sentence-transformers",)),
}
"""Sections that install a library which our environment cannot hold, with their page in `docs/how-to/import`.

`tests/installs` runs the sections of each library in an environment of its own.
"""

INSTALLING = {"docs/how-to/install.md", "docs/how-to/join-an-airflow.md"}
"""Pages that install Larder itself: `tests/installs` runs each in an environment that has none."""

ALL = [block for page in PAGES for block in of_page(page)]
"""Every block of every document, in the order of pages and lines."""


def of_library(name: str) -> list[Block]:
    """Return the blocks of a library's sections."""
    page, sections = LIBRARIES[name]
    return [block for block in ALL if block.page == f"docs/how-to/import/{page}" and block.section in sections]
