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
    """One fenced block: where it stands, its language, its text, and why it is not run, if it is not."""

    page: str
    line: int
    kind: str
    text: str
    reason: str

    @property
    def place(self) -> str:
        """Page and line, as editors take them."""
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield all blocks of a page, those within lists as well."""
    previous_token = None
    for token in MarkdownIt("commonmark").parse(text):
        if token.type in ("fence", "code_block"):
            is_comment = previous_token is not None and previous_token.type == "html_block"
            reason_match = (
                NOT_RUN.fullmatch(previous_token.content) if previous_token and is_comment else None
            )
            line = token.map[0] + 1 if token.map else 0
            yield Block(
                page,
                line,
                token.info.strip(),
                token.content,
                reason_match[1] if reason_match else "",
            )
        previous_token = token


def of_page(page: Path) -> list[Block]:
    """Return the blocks of a file of this repository."""
    return list(blocks(str(page.relative_to(ROOT)), page.read_text()))


LIBRARIES = {
    f"docs/how-to/import/{name}.md"
    for name in (
        "classifier-libraries",
        "lightfm",
        "rectools",
        "recbole",
        "torch-rechub",
        "sentence-transformers",
    )
}
"""Pages that install a library which our environment cannot hold: `tests/installs` runs each in one of its own."""

INSTALLING = {"docs/how-to/install.md", "docs/how-to/join-an-airflow.md"}
"""Pages that install Larder itself: `tests/installs` runs each in an environment that has none."""

ALL = [block for page in PAGES for block in of_page(page)]
"""Every block of every document, in the order of pages and lines."""
