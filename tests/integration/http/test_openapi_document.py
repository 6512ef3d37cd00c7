"""The OpenAPI document of a running service: schemas with names, examples that run, one answer for each operation."""

import copy
from collections.abc import AsyncIterator, Iterable
from urllib.parse import quote

import httpx
import pytest

from cache.config.events import EventsConfig
from cache.formats import THIS_RELEASE
from precompute.config.settings import NightConfig
from serving.app import create_app
from tests.integration.nights import build_night, histories
from tests.integration.serving_app import BASE, Running, serving, settings
from tests.openapi_document import Json, operations, parts, problems, resolved
from tests.unit.test_layering import ROOT


def open_words(name: str) -> list[str]:
    """Words of an answer, by the name of their schema."""
    from cache.tiers.reads import DescribedEnum
    from serving.requests.reasons import PUBLIC_MISS_REASONS, LiveReason, StaleReason

    reasons_by_schema: dict[str, Iterable[DescribedEnum]] = {
        "Reason": PUBLIC_MISS_REASONS, "LiveReason": LiveReason, "StaleReason": StaleReason,
    }  # fmt: skip
    return [str(reason) for reason in reasons_by_schema[name]]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=60, items=40)


@pytest.fixture
async def app(night: NightConfig) -> AsyncIterator[Running]:
    async with serving(night, events=EventsConfig(enabled=True)) as running:
        yield running


@pytest.fixture
async def document(app: Running) -> Json:
    return await app.get("/openapi.json")


async def test_the_document_is_the_services_own_under_every_fastapi(night: NightConfig) -> None:
    app = create_app(settings(night))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url=BASE) as http:
        # FastAPI versions newer than the locked one discard a stored document when routes change.
        app.openapi_schema = None

        document = (await http.get("/openapi.json")).json()

    assert "Answer" in document["components"]["schemas"]
    assert document["paths"]["/v1/lookup/{table}/{entity}"]["get"]["operationId"] == "lookup"


async def test_the_version_is_that_of_the_package(document: Json) -> None:
    assert document["info"]["version"] == THIS_RELEASE


def is_object(part: object) -> bool:
    """Whether a part of a document is the schema of an object."""
    type_ = part.get("type") if isinstance(part, dict) else None
    return isinstance(type_, str | list) and "object" in type_


async def test_every_object_has_a_name(document: Json) -> None:
    objects = {path for path, part in parts(document) if is_object(part)}

    assert {path for path in objects if path[:2] != ("components", "schemas") or len(path) > 3} == set()
    assert {"Answer", "EntityInput", "Problem", "Event"} <= {path[-1] for path in objects}


async def test_every_schema_of_an_object_says_what_it_holds(document: Json) -> None:
    objects = {path: part for path, part in parts(document) if is_object(part)}

    empty = {path for path, part in objects.items() if part.get("properties") == {}}
    silent = {path for path, part in objects.items() if not {"properties", "additionalProperties"} & part.keys()}
    assert empty | silent == set()


async def test_every_field_of_an_answer_is_in_its_schema(app: Running, document: Json, night: NightConfig) -> None:
    user = quote(min(histories(night)), safe="")
    closed_document = copy.deepcopy(document)
    for _, part in parts(closed_document["components"]):
        if is_object(part) and "properties" in part:
            part.setdefault("additionalProperties", False)
    await app.get(f"/v1/lookup/user_topk/{user}")

    for template, path in (
        ("/dashboard/data", "/dashboard/data"),
        ("/v1/generations", "/v1/generations"),
        ("/readyz", "/readyz"),
        ("/healthz", "/healthz"),
        ("/v1/lookup/{table}/{entity}", f"/v1/lookup/user_topk/{user}"),
        ("/v1/explain/{table}/{entity}", f"/v1/explain/user_topk/{user}"),
    ):
        schema = document["paths"][template]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert problems(closed_document, schema, await app.get(path)) == [], template


async def test_an_explanation_has_no_option_that_it_always_refuses(app: Running, document: Json) -> None:
    refused = await app.http.post("/v1/explain/user_topk", json={"entities": ["u"], "arm": "ranker=b"})

    assert refused.status_code == 422
    assert "arm" not in document["components"]["schemas"]["ExplainRequest"]["properties"]
    assert "arm" in document["components"]["schemas"]["LookupRequest"]["properties"]
    for path, method in (("/v1/explain/{table}/{entity}", "get"), ("/v1/explain/{table}", "post")):
        parameters = {parameter["name"] for parameter in document["paths"][path][method]["parameters"]}
        assert {"arm", "X-Larder-Arm"} & parameters == set() and "X-Deadline-Ms" in parameters


async def test_every_reference_leads_somewhere_and_every_schema_is_used(document: Json) -> None:
    references = {part["$ref"] for _, part in parts(document) if isinstance(part, dict) and "$ref" in part}

    schemas = document["components"]["schemas"]
    assert references == {f"#/components/schemas/{name}" for name in schemas}


async def test_every_array_says_what_it_holds(document: Json) -> None:
    arrays = [
        path for path, part in parts(document) if isinstance(part, dict) and part.get("type") == "array"
        and "items" not in part
    ]  # fmt: skip

    assert arrays == []


async def test_an_operation_has_one_answer_in_one_form_with_an_example(document: Json) -> None:
    for operation in operations(document):
        status, content = operation.answer
        if operation.path == "/metrics":
            assert list(content) == ["text/plain"]
            continue
        assert list(content) == ["application/json"], operation.name
        described = content["application/json"]
        assert "$ref" in described["schema"], operation.name
        assert problems(document, described["schema"], described["example"]) == [], operation.name
        assert status == ("202" if operation.path == "/v1/events" else "200")


async def test_an_operation_is_named_described_and_grouped(document: Json) -> None:
    names = [operation.described["operationId"] for operation in operations(document)]
    groups = {tag["name"] for tag in document["tags"]}

    assert len(names) == len(set(names))
    for operation in operations(document):
        described = operation.described
        assert described["operationId"].isidentifier() and "_" not in described["operationId"]
        assert described["summary"] and described["description"]
        assert set(described["tags"]) <= groups


async def test_a_refusal_has_an_error_with_a_code(document: Json) -> None:
    problem = document["components"]["schemas"]["Problem"]

    assert problem["required"] == ["error"]
    assert resolved(document, problem["properties"]["error"])["required"] == ["code", "message"]
    for operation in operations(document):
        if not operation.path.startswith("/v1/"):
            continue
        refusals = {
            status: response
            for status, response in operation.described["responses"].items()
            if not status.startswith("2")
        }
        expected_statuses = {"default", "500", "503"}
        if "requestBody" in operation.described:
            expected_statuses |= {"400", "408", "413", "415", "422"}
        assert expected_statuses <= refusals.keys(), operation.name
        for response in refusals.values():
            schema = response["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Problem"}, operation.name


@pytest.mark.parametrize("name", ["Reason", "LiveReason", "StaleReason"])
async def test_a_list_of_words_is_documented_and_open(document: Json, name: str) -> None:
    schemas = document["components"]["schemas"]
    known_schema = schemas[f"Known{name}"]
    reasons = open_words(name)

    assert known_schema["enum"] == reasons
    assert all(f"`{reason}`: " in known_schema["description"] for reason in reasons)
    for reason in (*reasons, "a word of a later release"):
        assert problems(document, schemas[name], reason) == []
    assert problems(document, schemas[name], 1) != []


async def test_fields_of_an_answer_refer_to_their_words(document: Json) -> None:
    fields = document["components"]["schemas"]["Answer"]["properties"]

    for field, name in (("reason", "Reason"), ("live", "LiveReason"), ("stale", "StaleReason")):
        assert fields[field] == {"$ref": f"#/components/schemas/{name}"}


async def test_every_operation_stands_on_the_reference_page(document: Json) -> None:
    page = (ROOT / "docs/reference/http-api.md").read_text()
    paths = {operation.path for operation in operations(document)}

    assert "/v1/feedback" in paths
    assert {path for path in paths if path not in page} == set()


async def test_examples_are_answered_as_they_are_documented(app: Running, document: Json, night: NightConfig) -> None:
    user = min(histories(night))
    for operation in operations(document):
        described = operation.described
        path = operation.path
        for parameter in described.get("parameters", ()):
            if parameter["in"] == "path":
                path = path.replace(f"{{{parameter['name']}}}", quote(parameter["example"], safe=""))
        status, content = operation.answer
        if operation.method == "get":
            response = await app.http.get(path)
        else:
            body = described["requestBody"]["content"]["application/json"]
            assert problems(document, body["schema"], body["example"]) == [], operation.name
            response = await app.http.post(path, json=body["example"])
        assert str(response.status_code) == status, (operation.name, response.text)
        if "application/json" in content:
            schema = content["application/json"]["schema"]
            assert problems(document, schema, response.json()) == [], operation.name
    stored_answer = await app.get(f"/v1/lookup/user_topk/{quote(user, safe='')}")
    schema = {"$ref": "#/components/schemas/Answer"}
    assert stored_answer["source"] == "l2" and problems(document, schema, stored_answer) == []


async def test_a_refusal_is_as_it_is_documented(app: Running, document: Json) -> None:
    schema = {"$ref": "#/components/schemas/Problem"}
    known_codes = document["components"]["schemas"]["KnownErrorCode"]["enum"]
    for method, path, body, status in (
        ("GET", "/v1/lookup/nothing/x", b"", 404),
        ("GET", "/v1/lookup/user_topk/x?k=0", b"", 422),
        ("GET", "/v1/lookup/user_topk/x?generation=gone", b"", 409),
        ("GET", "/v1/nothing", b"", 404),
        ("DELETE", "/v1/score", b"", 405),
        ("POST", "/v1/score", b"{", 422),
        ("POST", "/v1/lookup/user_topk", b"x" * (9 << 20), 413),
    ):
        response = await app.http.request(method, path, content=body)
        assert response.status_code == status, (path, response.text)
        assert problems(document, schema, response.json()) == []
        assert response.json()["error"]["code"] in known_codes


async def test_arrow_is_documented_next_to_the_schemas(document: Json) -> None:
    operation = document["paths"]["/v1/lookup/{table}"]["post"]

    for direction in ("requestBody", "response"):
        arrow_form = operation["x-larder-arrow"][direction]
        assert arrow_form["mediaType"] == "application/vnd.apache.arrow.stream" and arrow_form["description"]
    assert {"406", "415"} <= operation["responses"].keys()
    assert list(operation["requestBody"]["content"]) == ["application/json"]
