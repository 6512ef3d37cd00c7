"""Pages that a new user reads first: true to the package, examples before figures, in plain words."""

import re
import statistics
import tomllib
from pathlib import Path

import pytest

from tests.unit.test_layering import ROOT

README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GUIDES = [
    ROOT / "README.md",
    *(page for part in ("tutorial", "how-to", "explanation") for page in sorted((DOCS / part).rglob("*.md"))),
]  # fmt: skip
RIDDLES = re.compile(
    r"\b(mend(s|ed|ing)?|whoever|somebody|foretells?|strangers?|as ever|was had|what a user had|"
    r"(brought|brings?) along|which alert tells|(is|are) told|an extra that is missing|of a row in your own)\b",
    re.IGNORECASE,
)
"""Words that newcomers stumbled over; each has a plain one: repair, a user, an unknown user, without, report."""


def prose(page: Path) -> str:
    """Return a page's text without its blocks, inline code and the targets of its links."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def screen() -> str:
    """Return what a first look at the README shows."""
    return "\n".join(README.splitlines()[:40])


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_guide_has_none_of_the_words_that_newcomers_stumbled_over(page: Path) -> None:
    text = " ".join(prose(page).split())

    assert [word_match[0] for word_match in RIDDLES.finditer(text)] == []


def test_the_first_screen_says_what_larder_is_and_at_which_version() -> None:
    first_screen = screen()

    assert "pipeline" in first_screen and "service" in first_screen
    assert f"Version {PROJECT['version']}" in first_screen


def test_the_first_screen_installs_this_package_and_no_other() -> None:
    text = README.split("## Figures")[0]
    installed = re.findall(r"pip install [^\n`]*?'(\w[\w-]*)\[", text)

    assert PROJECT["name"] != "larder"  # on the index this is somebody else's package
    assert set(installed) == {PROJECT["name"]}
    assert f"pip install --find-links dist '{PROJECT['name']}[" in screen()


def test_an_example_stands_before_the_figures() -> None:
    assert 0 < README.index("```json") < README.index("## Figures")


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/from-your-data.md", "docs/how-to/install.md"])
def test_versions_of_python_are_those_of_the_package(page: str) -> None:
    minor_min, below = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    *first, last = [f"3.{minor}" for minor in range(int(minor_min), int(below))]

    text = " ".join((ROOT / page).read_text().split())

    assert f"Python {', '.join(first)} or {last}" in text
    assert "or newer" not in "".join(re.findall(r"Python 3\.\d+ or newer", text))


def test_the_readme_promises_no_answer_that_is_never_wrong() -> None:
    assert "never answers wrongly" not in README
    assert "whether it is a fallback" in " ".join(screen().split())


def test_the_readme_gives_the_median_of_a_figure_that_has_other_runs() -> None:
    rows = (DOCS / "reference/numbers.md").read_text().splitlines()
    (numbers,) = [row for row in rows if row.endswith("`http_floor` |")]
    best_figure, *other_figures = re.search(
        r"\*\*([\d.]+) x\*\*.*?, ([\d.]+) and ([\d.]+) in other runs", numbers
    ).groups()  # type: ignore[union-attr]
    (row,) = [row for row in README.splitlines() if "`http_floor`" in row and "ASGI" in row]

    median = statistics.median(map(float, (best_figure, *other_figures)))

    assert f"{median} x" in row
    assert all(figure in row for figure in (best_figure, min(other_figures)))


def test_the_page_on_alternatives_says_which_gpu_larder_ran_on() -> None:
    page = " ".join((DOCS / "explanation/which.md").read_text().split())

    assert "is listed: no GPU" not in page
    assert "NVIDIA H200" in page and "0.5.11" in page


def test_the_page_on_cold_starts_says_what_each_kind_of_model_takes() -> None:
    page = (DOCS / "explanation/cold-start.md").read_text()

    assert "With `history` or `features` in the request the live model answers" not in page
    assert "a history without the features is not enough" in page


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"= Example\(.*max_length=LENGTH", id="max_length"),
        pytest.param("item_attributes", id="filters"),
        pytest.param('"LabelEncoder"', id="texts"),
        pytest.param("user_features=", id="features"),
        pytest.param("the path of a Parquet or CSV file", id="tables"),
    ],
)
def test_the_page_on_torch_shows(pattern: str) -> None:
    page = (DOCS / "how-to/import/torch.md").read_text()

    assert re.search(pattern, page, re.DOTALL)


def test_a_page_leads_who_has_a_classifier_from_the_model_to_an_answer() -> None:
    index_page = (ROOT / "docs/how-to/import/index.md").read_text()
    page = ROOT / "docs/how-to/import/classifiers.md"

    assert "[Import a classifier or regressor](classifiers.md)" in index_page
    for step in ("write_bundle(", "values={", 'kind = "value"', "larder night", "/v1/lookup/risk/"):
        assert step in page.read_text(), step
