"""Documents: short where it is asked for, no link into the void, every room told of."""

import ast
import re
from pathlib import Path

import pytest

from cache.config.serving import ServingConfig
from tests.unit.test_layering import MODULES, ROOT

README_LINES_MAX = 200
DECISION_LINES_MAX = 55
DECISIONS = ROOT / "docs/decisions"
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "infra").glob("*.md")]


def anchors(page: Path) -> set[str]:
    """What its headings are linked by."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT) and target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_the_index_of_decisions_lists_exactly_the_files() -> None:
    linked_pages = re.findall(r"^- \[.+\]\((.+)\)$", (DECISIONS / "README.md").read_text(), re.MULTILINE)

    assert sorted(linked_pages) == sorted(str(page.relative_to(DECISIONS)) for page in DECISIONS.glob("*/*.md"))


@pytest.mark.parametrize("page", sorted(DECISIONS.glob("*/*.md")), ids=lambda page: page.stem)
def test_a_decision_is_short_and_has_its_parts_in_their_order(page: Path) -> None:
    text = page.read_text()

    assert len(text.splitlines()) <= DECISION_LINES_MAX
    assert re.match(r"# \S.*\n\n20\d\d-\d\d-\d\d\n\n", text)
    assert f"- [{text.partition(chr(10))[0][2:]}](" in (DECISIONS / "README.md").read_text()
    parts = " ".join(re.findall(r"^\*\*([A-Z][a-z ]+)\.\*\* \S", text, re.MULTILINE))
    assert re.fullmatch("Decided Why( Figure)? Cost Would change it( Before)?", parts)


def test_every_module_that_is_named_exists() -> None:
    for page in PAGES:
        for path in re.findall(r"`((?:cache|serving|precompute|dags|tests)/[\w/]+\.py)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


LEARNING = ROOT / "docs/explanation"
PAGES_OF_CODE = [
    ROOT / "docs/architecture.md",
    ROOT / "docs/read-first.md",
    ROOT / "docs/how-to/contribute.md",
    LEARNING / "one-answer.md",
    *sorted(LEARNING.glob("life-of-*.md")),
]
"""Pages that name functions, classes and settings of the code by their full names."""


def definitions(module: str) -> set[str]:
    """Return the qualified names of functions, classes and assigned names in a module."""
    names: set[str] = set()

    def collect(statements: list[ast.stmt], prefix: str) -> None:
        for statement in statements:
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + statement.name)
                collect(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    names.update(prefix + node.id for node in ast.walk(target) if isinstance(node, ast.Name))

    collect(ast.parse(MODULES[module].read_text()).body, "")
    return names


def is_defined(name: str) -> bool:
    """True for the full name of a module, or of anything that a module defines itself."""
    parts = name.split(".")
    module = next((".".join(parts[:end]) for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in MODULES), None)
    if module is None:
        return False
    return name == module or name.removeprefix(f"{module}.") in definitions(module)


@pytest.mark.parametrize("page", PAGES_OF_CODE, ids=lambda page: page.stem)
def test_every_name_of_the_code_that_a_page_names_is_defined(page: Path) -> None:
    names = re.findall(r"`((?:cache|serving|precompute|dags)(?:\.\w+)+)`", page.read_text())

    assert [name for name in names if not name.endswith(".py") and not is_defined(name)] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("serving.engine.ladder", True),
        ("serving.engine.ladder.Ladder.lookup", True),
        ("serving.http.routes.Guard.wrap_handler.answer", True),
        ("serving.replica.hooks.Hooks.routers", True),
        ("serving.engine.ladder.Ladder.climb", False),
        ("serving.engine.ladders", False),
        ("serving.engine.ladder.AnswerBuilder", False),  # imported there, defined elsewhere
    ],
)
def test_a_name_is_looked_up_where_it_is_defined(name: str, expected: bool) -> None:
    assert is_defined(name) is expected


def test_the_twelve_files_to_read_first_answer_the_thirty_questions() -> None:
    text = (ROOT / "docs/read-first.md").read_text()
    files = dict(re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| .+\? \|$", text, re.MULTILINE))
    questions = re.findall(r"^\| .+\? \| (\d+) `([\w.]+)` \|$", text, re.MULTILINE)

    assert list(files) == [str(number) for number in range(1, 13)]
    assert len(questions) == 30 and {number for number, _ in questions} == set(files)
    for number, name in questions:
        module = files[number].removesuffix(".py").replace("/", ".")
        assert is_defined(f"{module}.{name}"), f"{number} {name}"


def test_every_bound_that_security_names_is_a_setting_with_that_default() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("| input | bound |")[2].partition("\n\n")[0]
    limits = [
        (name, *number_and_unit) for name, *number_and_unit in re.findall(r"`(\w+)` \(([\d,]+)( [KM]iB)?\)", table)
    ]
    scale = {"": 1, " KiB": 1 << 10, " MiB": 1 << 20}

    assert set(re.findall(r"`(\w+)`", table)) == {name for name, *_ in limits}
    assert len(limits) > 20
    for name, number, unit in limits:
        assert getattr(ServingConfig(), name) == int(number.replace(",", "")) * scale[unit], name


def table_of_packages(top: str) -> str:
    """The packages below a top-level one, by name, with the first line of each one's docstring."""
    lines = [f"| package of `{top}` | holds |", "|---|---|"]
    for name, file in sorted(MODULES.items()):
        if name.startswith(f"{top}.") and file.name == "__init__.py":
            first_line = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
            package = name.partition(".")[2].replace(".", "/")
            lines.append(f"| `{package}` | {first_line} |")
    return "\n".join(lines)


@pytest.mark.parametrize("top", ["cache", "serving", "precompute"])
def test_the_architecture_lists_all_packages(top: str) -> None:
    assert table_of_packages(top) in (ROOT / "docs/architecture.md").read_text()
