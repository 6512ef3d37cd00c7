"""Whatever is sent, answers are as the OpenAPI document has them: Schemathesis over a real service."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test
from schemathesis import GenerationMode
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from precompute.config.settings import NightConfig
from tests import hostile
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started

WITH_INPUT = {
    "GET /v1/lookup/{table}/{entity}", "POST /v1/lookup/{table}", "POST /v1/lookup", "POST /v1/score",
    "POST /v1/feedback", "POST /v1/events", "GET /v1/explain/{table}/{entity}", "POST /v1/explain/{table}",
}  # fmt: skip
WITHOUT_INPUT = {
    "GET /v1/generations", "GET /dashboard/data", "GET /healthz", "GET /readyz", "GET /metrics",
}  # fmt: skip
TABLES = ["user_topk", "user_vector", "item_vector", "item_similar", "user_affinity", "nothing"]
FUZZ_SETTINGS = partial(
    settings, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
EVENTS = "POST /v1/events"
NOT_SAID = [positive_data_acceptance]
"""To JSON Schema 1.0 is an integer, an id has characters, not bytes, and no table says how many items it holds."""


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("fuzzed"), redis_url)


@pytest.fixture(scope="module")
def url(night: NightConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("state")
    (state / "larder.toml").write_text("[events]\nenabled = true\n")
    more = {"REDIS_URL": str(night.redis_url), "LARDER_CONFIG": str(state / "larder.toml")}
    with started(environment(night, state, **more)) as (_, service_url):
        yield service_url


@pytest.fixture(scope="module")
def api(url: str, night: NightConfig) -> Any:
    """The document, whose tables and ids are often such as there are."""
    document = httpx.get(f"{url}/openapi.json").json()
    ids = [*sorted(histories(night))[:8], "i-00001", "i-00002", *hostile.EVERY[:20]]
    _name_known(document, ids)
    _link(document["paths"])
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    return schema


def _name_known(value: Any, ids: list[str]) -> None:
    if isinstance(value, list):
        for child in value:
            _name_known(child, ids)
    elif isinstance(value, dict):
        if str(value.get("description")).startswith("1 to 256 bytes") and "oneOf" in value:
            value["anyOf"] = [{"enum": ids}, *value.pop("oneOf")]
        elif value.get("in") == "path" and value["name"] == "table":
            value["schema"] = {"enum": TABLES}
        elif value.get("in") == "path":
            value["schema"] = {"anyOf": [{"enum": ids}, {"type": "string", "minLength": 1}]}
        for child in value.values():
            _name_known(child, ids)


def _link(paths: Any) -> None:
    """Link each answer to further requests: the same generation, similar items, their order, feedback."""
    single_lookup, batch_lookup = (paths["/v1/lookup/{table}/{entity}"]["get"], paths["/v1/lookup/{table}"]["post"])
    for operation, answer in ((single_lookup, ""), (batch_lookup, "/answers/0")):
        generation, items = (f"$response.body#{answer}/{name}" for name in ("generation", "items"))
        pinned = {"table": "user_topk", "generation": generation}
        like = {"table": "item_similar", "entity": f"{items}/0"}
        follow: dict[str, tuple[Any, dict[str, Any]]] = {
            "again": (single_lookup, {"parameters": {**pinned, "entity": f"$response.body#{answer}/id"}}),
            "like": (single_lookup, {"parameters": like}),
            "why": (paths["/v1/explain/{table}/{entity}"]["get"], {"parameters": like}),
            "rank": (
                paths["/v1/score"]["post"],
                {"requestBody": {"user": {"history": items}, "items": items, "generation": generation}},
            ),
            "came": (
                paths["/v1/feedback"]["post"],
                {"requestBody": {"event": "click", "generation": generation}},
            ),
        }  # fmt: skip
        operation["responses"]["200"]["links"] = {
            name: {"operationId": to["operationId"], **link_fields} for name, (to, link_fields) in follow.items()
        }  # fmt: skip


def fuzz(api: Any, label: str, mode: GenerationMode, examples: int) -> None:
    (operation,) = (result.ok() for result in api.get_all_operations() if result.ok().label == label)

    @FUZZ_SETTINGS(max_examples=examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: Any) -> None:
        wrong = {location for location, how in case.meta.components.items() if how.mode.is_negative}
        # Every value in a path becomes a text, and every text is a valid id.
        only_path = wrong == {ParameterLocation.PATH}
        # An invalid event is rejected alone, and the request is accepted.
        is_invalid_event = label == EVENTS and bool(wrong)
        response = case.call_and_validate(
            timeout=30, excluded_checks=NOT_SAID + (only_path or is_invalid_event) * [negative_data_rejection]
        )
        assert not is_invalid_event or response.status_code != 202 or response.json()["rejected"]

    conforms()


def walk(api: Any, examples: int) -> None:
    class Walk(api.as_state_machine()):  # type: ignore[misc]
        def validate_response(self, response: Any, case: Any, **more: Any) -> None:
            # An earlier answer may have replaced a part of the case, so a case made to be wrong may be right by now.
            case.validate_response(response, excluded_checks=[*NOT_SAID, negative_data_rejection])

    run_state_machine_as_test(Walk, settings=FUZZ_SETTINGS(max_examples=examples, stateful_step_count=8))


def test_every_route_is_fuzzed(api: Any) -> None:
    labels = {result.ok().label for result in api.get_all_operations()}

    assert labels == WITH_INPUT | WITHOUT_INPUT


@pytest.mark.parametrize("label", sorted(WITH_INPUT))
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_as_documented(api: Any, label: str, mode: GenerationMode) -> None:
    fuzz(api, label, mode, examples=8)


@pytest.mark.parametrize("label", sorted(WITHOUT_INPUT))
def test_what_takes_no_input_is_as_documented(api: Any, label: str) -> None:
    fuzz(api, label, GenerationMode.POSITIVE, examples=1)


def test_what_answers_lead_to_is_as_documented(api: Any) -> None:
    walk(api, examples=4)


@pytest.mark.storm
@pytest.mark.parametrize("label", sorted(WITH_INPUT))
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_many_answers_are_as_documented(api: Any, label: str, mode: GenerationMode) -> None:
    fuzz(api, label, mode, examples=500)


@pytest.mark.storm
def test_what_many_answers_lead_to_is_as_documented(api: Any) -> None:
    walk(api, examples=100)
