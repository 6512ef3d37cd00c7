"""The page about the HTTP API, and the codes of refusals that it lists."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module

import pytest

from cache.errors import InvalidInput
from serving.access.token_file import MEANING_BY_SCOPE
from serving.client.calls import Options
from serving.config.settings import ServingConfig, request_limits
from serving.features import all_operations
from serving.http.openapi import refusal_codes
from serving.reference import API_PAGE, generated_sections, page_with_sections
from serving.requests.options import REQUEST_OPTIONS
from tests.unit.test_layering import ROOT

ERROR_CODES = refusal_codes(all_operations(request_limits(ServingConfig())))
FOUND_ELSEWHERE = {"unknown_table", "in_future", "too_large", "erased", "unfit_item", "fixed_items"}
"""Words that also say why one event of many was rejected."""


def raised() -> Iterator[tuple[str, str, int]]:
    """Yield each code that a refusal is made with, its file and its status."""
    for file in sorted((ROOT / "serving").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            values = [argument.value if isinstance(argument, ast.Constant) else None for argument in node.args]
            if node.func.id == "Problem" and isinstance(values[0], int):
                if isinstance(values[1], str):
                    yield values[1], file.name, values[0]
            elif node.func.id == "unprocessable" and isinstance(values[0], str):
                yield values[0], file.name, 422


def test_the_page_is_made_of_the_declarations() -> None:
    page = API_PAGE.read_text()

    assert page_with_sections(page) == page, "python -m serving.reference --write"
    assert all(f"<!-- begin {name}: " in page for name in generated_sections())


def test_the_page_has_every_route_and_its_scope() -> None:
    routes = generated_sections()["routes"]

    for path in ("/v1/feedback", "/v1/score", "/v1/events", "/v1/lookup/{table}/{entity}"):
        assert path in routes
    assert all(f"`{scope}`" in routes for scope in MEANING_BY_SCOPE)


def test_the_client_has_every_option() -> None:
    assert {option_field.name for option_field in fields(Options)} == set(REQUEST_OPTIONS)


@pytest.mark.parametrize(("code", "file", "status"), sorted(set(raised())))
def test_every_refusal_has_its_code_on_the_page(code: str, file: str, status: int) -> None:
    if file == "reading.py" and code in FOUND_ELSEWHERE:
        return  # of one event, which is rejected beside the others
    assert code in ERROR_CODES, file
    assert ERROR_CODES[code].http_status == status


def subclasses(base: type[InvalidInput]) -> Iterator[type[InvalidInput]]:
    """Yield a class and all that derive from it."""
    yield base
    for subclass in base.__subclasses__():
        yield from subclasses(subclass)


def test_codes_of_errors_are_those_of_their_classes() -> None:
    import_module("serving.filters.filtered_lookup")  # defines what a request's filter may raise

    of_events = {"unfit_item", "fixed_items"}
    assert {error_class.code for error_class in subclasses(InvalidInput)} - of_events <= set(ERROR_CODES)
