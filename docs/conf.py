"""Site of the documents, by Sphinx: `make docs`.

The source folder is the repository's root, so that links between documents are the same here as on a code host.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "Larder"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "infra/*.md"]
exclude_patterns = [".*", "build", "dist", "tests"]

extensions = ["myst_parser"]
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = f"Larder {version}"
html_show_copyright = False
html_show_sourcelink = False
templates_path = []


def setup(app):
    """Give the index of decisions its place for the pages below it, which a code host would show as text."""
    app.connect("source-read", _with_decisions)


def _with_decisions(_app, document, source):
    if document == "docs/decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*/*\n```\n"
