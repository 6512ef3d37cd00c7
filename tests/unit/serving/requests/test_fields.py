"""The fields of an answer stand in one place: whatever is rendered or written about them says the same."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from serving.client.answers import read_answers
from serving.http import schemas
from serving.requests.answers import (
    FALLBACK_SOURCES,
    ORIGIN_FIELDS,
    PREDICTION_FIELDS_BY_KIND,
    STORED_SOURCES,
    Answer,
    AnswerField,
    Origin,
    Ranking,
    Source,
    declared_fields,
)
from tests.unit.test_layering import FILES, ROOT

WHEN = {
    "always": "always", "told": "if it applies", "topk": "top-K tables",
    "vector": "vector tables", "value": "value tables",
}  # fmt: skip
KINDS = {"array": "list", "integer": "integer", "number": "number", "boolean": "boolean"}

EXEMPT_FILES = {ROOT / "cache/tiers/reads.py"}
"""The tiers, which know nothing of the other sources."""


def row(field: AnswerField) -> str:
    """The field's line in the reference page."""
    null = " or null" * field.declaration.is_nullable
    type_ = "word" if "enum" in field.json_schema else "text"
    for name in (field.json_schema.get("type"), *list(field.json_schema.get("type") or ())):
        type_ = KINDS.get(str(name), type_)
    column = "metadata" if field.name == "table" else f"`{field.arrow_type_name}`"
    declaration = field.declaration
    return f"| `{field.name}` | {type_}{null} | {column} | {WHEN[declaration.present_when]} | {declaration.meaning} |"


def test_the_reference_page_has_every_field_and_no_other() -> None:
    page = (ROOT / "docs/reference/http-api.md").read_text()
    every = [*map(row, declared_fields(Answer)), *map(row, declared_fields(Ranking)[len(declared_fields(Origin)) :])]
    page_rows = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == 6]

    assert "\n".join(page_rows) == "\n".join(every)


@pytest.mark.parametrize(("declared", "schema"), [(Answer, schemas.ANSWER), (Ranking, schemas.RANKED_ITEMS)])
def test_the_schema_has_every_field_and_demands_what_is_always_there(
    declared: type[Origin], schema: dict[str, Any]
) -> None:
    assert list(schema["properties"]) == [field.name for field in dataclasses.fields(declared)]
    assert {field.name for field in declared_fields(declared) if field.declaration.present_when == "always"} == set(
        schema["required"]
    )


def test_every_field_of_an_answer_is_of_all_or_of_one_kind_of_tables() -> None:
    predicted = [field for kind in PREDICTION_FIELDS_BY_KIND.values() for field in kind]

    assert declared_fields(Answer) == (*declared_fields(Origin)[:2], *ORIGIN_FIELDS, *predicted)
    assert {field.declaration.present_when for field in (*declared_fields(Origin), *declared_fields(Ranking))} == {
        "always", "told",
    }  # fmt: skip


def test_a_source_or_a_field_that_only_a_newer_service_has_breaks_no_client() -> None:
    newer_fields = {
        "id": "u", "table": "t", "source": "oracle", "generation": "g", "age_seconds": 1.5, "published_at": "2026",
        "more": [1],
    }  # fmt: skip
    known_fields = {**newer_fields, "source": "l1", "producer": None}

    newer_answers, (answer,) = (
        read_answers(orjson.dumps({"answers": [answer_fields]}), 1) for answer_fields in (newer_fields, known_fields)
    )

    assert str(newer_answers[0].source) == "oracle" and answer.source is Source.L1


def test_sources_are_those_that_are_stored_and_live_and_what_is_left() -> None:
    assert [*STORED_SOURCES, *FALLBACK_SOURCES] == [source for source in Source if source is not Source.LIVE]


def test_the_dashboard_draws_the_sources_in_the_order_of_the_ladder() -> None:
    page = (ROOT / "serving/dashboard/page/series.js").read_text()
    drawn = re.findall(r'\{ name: "(\w+)", label: .*, tone: ', page)

    assert [source_name for source_name in drawn if source_name in set(Source)] == list(Source)


@pytest.mark.parametrize("page", ["http-api", "glossary"])
def test_the_documents_list_the_sources_in_the_order_of_the_ladder(page: str) -> None:
    list_pattern = r"`l1`(?:(?:, | or )`\w+`)+"
    source_lists = re.findall(list_pattern, (ROOT / "docs/reference" / f"{page}.md").read_text())

    assert [tuple(re.findall(r"\w+(?=`)", source_list)) for source_list in source_lists] == [tuple(Source)]


@pytest.mark.parametrize("file", sorted(set(FILES) - EXEMPT_FILES), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_lists_the_sources_again(file: Path) -> None:
    assert [constants for constants in listings(ast.parse(file.read_text())) if is_of_sources(constants)] == []


def listings(tree: ast.AST) -> Iterator[set[Any]]:
    """Constants that stand in one tuple, list, set or subscript."""
    for node in ast.walk(tree):
        parts = getattr(node, "elts", ())
        yield {element_node.value for element_node in parts if isinstance(element_node, ast.Constant)}


def is_of_sources(constants: set[Any]) -> bool:
    """True if it is about them: generations are called live and previous as well, and documents have such fields."""
    named_sources = constants.intersection(Source)
    return len(named_sources) > 1 and len(constants - named_sources) < 2 and not named_sources <= {"live", "previous"}
