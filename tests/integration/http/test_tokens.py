"""Who may do what: every route and every scope, wrong tokens, quotas and changes, on both ways of the service."""

import datetime as dt
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from cache.config.events import EventsConfig
from precompute.config.settings import NightConfig
from serving.access.token_file import MEANING_BY_SCOPE, Scope
from serving.client import Client, Forbidden, Policy, QuotaExceeded, TokenExpired, Unauthorized
from serving.dashboard.attach import DASHBOARD_PAGE
from serving.http.routes import DOCS_PAGE
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started
from tests.integration.serving_app import Running, serving
from tests.integration.token_files import EXPIRED, TokenPlace
from tests.openapi_document import operations
from tests.polling import poll_until

Route = tuple[str, str]
NEEDS: dict[Route, Scope] = {
    ("GET", "/v1/lookup/{table}/{entity:rest}"): "read",
    ("POST", "/v1/lookup/{table}"): "read",
    ("POST", "/v1/lookup"): "read",
    ("GET", "/v1/generations"): "read",
    ("POST", "/v1/score"): "score",
    ("POST", "/v1/feedback"): "feedback",
    ("POST", "/v1/events"): "events",
    ("GET", "/v1/explain/{table}/{entity:rest}"): "explain",
    ("POST", "/v1/explain/{table}"): "explain",
    ("GET", "/dashboard/data"): "admin",
}
"""Scope of every route that asks for one: a route that is new is to stand here, or among those open to all."""
OPEN: set[Route] = {
    ("GET", path)
    for path in (
        "/healthz", "/readyz", "/metrics", "/openapi.json",
        *(route.path for route in (*DASHBOARD_PAGE.routes(), *DOCS_PAGE.routes())),
    )
}  # fmt: skip
USER = "nobody-at-all"
BODIES: dict[str, Any] = {
    "/v1/lookup/{table}": {"entities": [USER]},
    "/v1/lookup": {"entities": [{"id": USER, "table": "user_topk"}]},
    "/v1/score": {"user": USER, "items": ["i"]},
    "/v1/feedback": {"event": "click", "canary_key": "k"},
    "/v1/events": {"events": [{"user": USER, "item": "i", "id": "e"}]},
    "/v1/explain/{table}": {"entities": [USER]},
}


@pytest.fixture(scope="module", params=["fast", "plain"])
def transport(request: pytest.FixtureRequest) -> str:
    """Which way the service answers."""
    return str(request.param)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=60, items=40)


@pytest.fixture(scope="module")
def known_path(night: NightConfig) -> str:
    """The path of a lookup that the night answers."""
    return f"/v1/lookup/user_topk/{quote(min(histories(night)), safe='')}"


@pytest.fixture
def token_file(tmp_path: Path) -> TokenPlace:
    return place_in(tmp_path)


def place_in(folder: Path) -> TokenPlace:
    """A token for each scope alone, and one that has expired."""
    token_file = TokenPlace(folder / "tokens.json")
    for scope in MEANING_BY_SCOPE:
        token_file.add(scope, scope)
    token_file.add("late", expires_at=EXPIRED)
    return token_file


@pytest.fixture
async def app(night: NightConfig, token_file: TokenPlace, transport: str) -> AsyncIterator[Running]:
    async with serving(
        night,
        tokens_file=str(token_file.path),
        token="sesame",
        fast_http=transport == "fast",
        events=EventsConfig(enabled=True),
    ) as running:
        yield running


def routes_of(app: Running) -> dict[Route, Any]:
    """Every route of the application, as routers know it."""
    transport: Any = app.http._transport
    route_by_method_path = {}
    for route in transport.app.router.routes:
        for method in route.methods - {"HEAD"}:
            route_by_method_path[method, route.path] = route
    return route_by_method_path


def request_of(route: Route) -> tuple[str, str, Any]:
    method, path = route
    concrete_path = path.replace("{table}", "user_topk").replace("{entity:rest}", USER)
    return method, concrete_path, BODIES.get(path)


async def send_request(app: Running, route: Route, headers: dict[str, str]) -> httpx.Response:
    method, path, body = request_of(route)
    return await app.http.request(method, path, json=body, headers=headers)


async def test_every_route_asks_for_exactly_its_scope(app: Running, token_file: TokenPlace) -> None:
    routes = routes_of(app)
    assert set(routes) == NEEDS.keys() | OPEN and NEEDS.keys().isdisjoint(OPEN)

    table: dict[Route, dict[str, int]] = {}
    for route, needed in NEEDS.items():
        for scope in MEANING_BY_SCOPE:
            response = await send_request(app, route, token_file.header(scope))
            error = response.json().get("error", {})
            if scope == needed:
                assert response.status_code in (200, 202, 404, 409, 422), (route, scope, response.text)
            else:
                assert response.status_code == 403 and error["code"] == "scope_missing"
                assert error["scope"] == needed and error["scopes"] == [scope]
            table.setdefault(route, {})[scope] = response.status_code
        for headers, code in (
            ({}, "unauthorized"), ({"Authorization": "Bearer wrong"}, "unauthorized"),
            (token_file.header("late"), "token_expired"),
        ):  # fmt: skip
            refused = await send_request(app, route, headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, code)
            assert refused.headers["www-authenticate"] == "Bearer"
        everything = await send_request(app, route, {"Authorization": "Bearer sesame"})
        assert everything.status_code in (200, 202, 404, 409, 422), (route, everything.text)
    assert {
        route: [scope for scope, status in status_by_scope.items() if status != 403]
        for route, status_by_scope in table.items()
    } == {route: [needed] for route, needed in NEEDS.items()}
    for route in OPEN:
        assert (await send_request(app, route, {})).status_code in (200, 308), route


async def test_the_document_tells_of_every_scope_and_refusal(app: Running) -> None:
    document = await app.get("/openapi.json")

    scope_by_route = {}
    for (method, path), route in routes_of(app).items():
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        described = document["paths"][path.replace(":rest", "")][method.lower()]
        if (needed := NEEDS.get((method, path))) is None:
            assert "security" not in described
            continue
        scope_by_route[method, path] = needed
        assert described["security"] == [{"bearer": [needed]}]
        assert f"scope {needed}" in described["responses"]["403"]["description"]
        assert "token_expired" in described["responses"]["401"]["description"]
        assert "Retry-After" in described["responses"]["429"]["description"]
    assert scope_by_route == NEEDS


async def test_without_tokens_nothing_is_asked_and_nothing_documented(night: NightConfig) -> None:
    async with serving(night) as open_:
        for route in NEEDS:
            assert (await send_request(open_, route, {})).status_code not in (401, 403)
        document = await open_.get("/openapi.json")
    assert document["security"] == [] and "securitySchemes" not in document["components"]
    for operation in operations(document):
        assert "security" not in operation.described and "401" not in operation.described["responses"]


@dataclass
class Service:
    """A program that serves, with its tokens and its log."""

    url: str
    token_file: TokenPlace
    log: Path
    known_path: str

    def get(self, name: str, client: httpx.Client, path: str = "") -> httpx.Response:
        """The answer to the owner of a token."""
        return client.get(self.url + (path or self.known_path), headers=self.token_file.header(name))

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples of a series by their label values, in the order of label names."""
        text = httpx.get(f"{self.url}/metrics").text
        return {
            tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }


@pytest.fixture(scope="module")
def service(
    night: NightConfig, known_path: str, tmp_path_factory: pytest.TempPathFactory, transport: str
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp(transport)
    token_file = place_in(folder)
    more = {
        "REDIS_URL": str(night.redis_url), "LARDER_TOKENS_FILE": str(token_file.path), "LARDER_TOKEN": "sesame-sesame",
        "LARDER_FAST_HTTP": "on" if transport == "fast" else "off", "LARDER_LOG_SHARE": "1", "LARDER_LOG": "json",
        "LARDER_LOG_LINES_PER_S": "1000", "LARDER_DASHBOARD_S": "0.2",
    }  # fmt: skip
    log = folder / "log"
    with started(environment(night, folder / "state", **more), log) as (_, url):
        yield Service(url, token_file, log, known_path)


def test_a_thousand_wrong_tokens_are_refused_alike(service: Service) -> None:
    right, replies = service.token_file.tokens["read"], set[tuple[int, bytes]]()
    near = [right[:-1] + letter for letter in "AZ" if not right.endswith(letter)]
    with httpx.Client() as client:
        for _ in range(3):
            assert service.get("read", client).status_code == 200
        random = [f"larder_{secrets.token_urlsafe(32)}" for _ in range(1_000)]
        for wrong in [*near, right.lower(), *random]:
            headers = {"Authorization": f"Bearer {wrong}"}
            response = client.get(service.url + service.known_path, headers=headers)
            replies.add((response.status_code, response.content))
        assert {status for status, _ in replies} == {401} and len(replies) == 1
        assert service.get("read", client).status_code == 200
    assert "server-timing" not in response.headers


def test_a_token_is_in_force_or_not_within_a_second_also_where_it_was_judged_before(service: Service) -> None:
    token_file = service.token_file
    with httpx.Client() as client:
        for _ in range(5):  # the same head again and again: ready answers, by a judgement that is kept
            assert service.get("read", client).status_code == 200
        token_file.drop("read")  # a revoked token
        assert poll_until(lambda: service.get("read", client).status_code == 401, 5)
        assert service.get("score", client).status_code == 403
        token_file.add("new", "read")
        assert poll_until(lambda: service.get("new", client).status_code == 200, 5)

        token_file.path.write_text("{")
        assert poll_until(lambda: service.series("larder_tokens_stale") == {(): 1.0}, 5)
        for _ in range(3):
            assert service.get("new", client).status_code == 200
        token_file.add("read", "read")
        assert poll_until(lambda: service.series("larder_tokens_stale") == {(): 0.0}, 5)
    lines = [line for line in service.log.read_text().splitlines() if "previous tokens stay in force" in line]
    assert len(lines) == 1 and str(token_file.path) in lines[0]


def test_a_token_that_expires_is_refused_from_then_on(service: Service) -> None:
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=2.5)
    service.token_file.add("brief", "read", expires_at=soon.isoformat())
    with httpx.Client() as client:
        assert poll_until(lambda: service.get("brief", client).status_code == 200, 2)
        assert poll_until(lambda: service.get("brief", client).status_code == 401, 5)
        assert dt.datetime.now(dt.UTC) >= soon
        response = service.get("brief", client)
    assert response.json()["error"]["code"] == "token_expired"
    assert service.series("larder_token_refusals_total")["expired", "brief"] >= 1


def test_quotas_are_kept_on_both_transports_and_refusals_say_when_to_come_again(service: Service) -> None:
    token_file = service.token_file
    token_file.add("few", "read", requests_per_s=0.01)
    token_file.add("light", "read", entities_per_s=0.01)
    post = f"{service.url}/v1/lookup/user_topk"
    with httpx.Client() as client:
        assert poll_until(lambda: service.get("light", client).status_code == 200, 5)
        assert service.get("few", client).status_code == 200
        for path in (service.known_path, "/v1/generations", "/v1/lookup/user_topk/nobody?fresh=true"):
            refused = service.get("few", client, path)
            error = refused.json()["error"]
            assert refused.status_code == 429 and error["code"] == "quota_exceeded"
            assert (error["quota"], error["limit"]) == ("requests_per_s", 0.01)
            assert 1 <= int(refused.headers["retry-after"]) <= 100
        for body in ({"entities": ["a", "b"]}, {"entities": [{"id": "a", "history": ["i"]}]}):
            refused = client.post(post, json=body, headers=token_file.header("light"))
            assert refused.status_code == 429
            assert refused.json()["error"]["quota"] == "entities_per_s"
        # A request that names no entity is let through.
        assert service.get("light", client, "/v1/generations").status_code == 200
        # A batch larger than a burst is let through once, and later requests wait until it is paid for.
        token_file.add("once", "read", entities_per_s=0.01)
        ids = {"entities": [f"u-{number}" for number in range(20)]}

        def batch() -> int:
            return client.post(post, json=ids, headers=token_file.header("once")).status_code

        assert poll_until(lambda: batch() == 200, 5) and batch() == 429
    refusals = service.series("larder_token_refusals_total")
    assert refusals["requests_per_s", "few"] == 3 and refusals["entities_per_s", "light"] >= 2
    requests = service.series("larder_token_requests_total")
    assert requests["few",] >= 4 and requests["once",] >= 2


def test_requests_in_flight_are_bounded_and_their_places_come_back(service: Service) -> None:
    token_file = service.token_file
    header = token_file.add("narrow", "read", in_flight=1)["Authorization"]
    where = urlsplit(service.url)
    head = (
        f"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: a\r\nAuthorization: {header}\r\n"
        "Content-Type: application/json\r\nContent-Length: 20\r\n\r\n"
    ).encode()
    with httpx.Client() as client:
        assert poll_until(lambda: service.get("narrow", client).status_code == 200, 5)
        for _ in range(5):
            assert service.get("narrow", client).status_code == 200
        with socket.create_connection((where.hostname, where.port)) as slow:
            slow.sendall(head)  # its body takes its time
            assert poll_until(lambda: service.get("narrow", client).status_code == 429, 5)
            response = service.get("narrow", client)
            assert response.json()["error"]["quota"] == "in_flight"
            assert response.headers["retry-after"] == "1"
            slow.sendall(b'{"entities":["abcd"]')
            slow.settimeout(10)
            assert slow.recv(100).startswith(b"HTTP/1.1 422")
        assert poll_until(lambda: service.get("narrow", client).status_code == 200, 5)
        with socket.create_connection((where.hostname, where.port)) as abandoned_connection:
            abandoned_connection.sendall(head)
            assert poll_until(lambda: service.get("narrow", client).status_code == 429, 5)
        assert poll_until(lambda: service.get("narrow", client).status_code == 200, 15)


def test_the_client_has_an_error_for_every_refusal_and_waits_as_asked(service: Service) -> None:
    token_file, user = service.token_file, min(MEANING_BY_SCOPE)
    token_file.add("steady", "read", requests_per_s=2.0)
    with httpx.Client() as probe:
        assert poll_until(lambda: service.get("steady", probe).status_code == 200, 5)
    for name, error in (("score", Forbidden), ("late", TokenExpired)):
        with Client(service.url, token=token_file.tokens[name]) as client, pytest.raises(error) as exc_info:
            client.lookup("user_topk", user)
        assert not isinstance(exc_info.value, Forbidden) or exc_info.value.scope == "read"
    with Client(service.url, token="wrong") as client, pytest.raises(Unauthorized):
        client.lookup("user_topk", user)
    patient = Policy(deadline_ms=8_000, attempts=6)
    with Client(service.url, token=token_file.tokens["steady"], policy=patient) as client:
        for _ in range(4):  # more than a burst: each comes again after Retry-After
            client.lookup("user_topk", user)

    def ask_at_once(client: Client) -> None:
        for _ in range(5):
            client.lookup("user_topk", user)

    with Client(service.url, token=token_file.tokens["steady"]) as client, pytest.raises(QuotaExceeded) as short:
        ask_at_once(client)
    assert short.value.quota == "requests_per_s" and 0 < short.value.retry_after_s <= 1


def test_no_secret_is_written_down_and_names_are(service: Service, night: NightConfig) -> None:
    token_file = service.token_file
    token_file.add("rare", "read", "explain", requests_per_s=0.01)
    texts: list[str] = []
    with httpx.Client() as client:
        assert poll_until(lambda: service.get("rare", client).status_code == 200, 5)
        for name in token_file.tokens:
            for method, path, body in map(request_of, NEEDS):
                response = client.request(method, service.url + path, json=body, headers=token_file.header(name))
                texts += [response.text, str(response.headers)]
        strange = f"larder_{secrets.token_urlsafe(32)}"
        for path in (f"/v1/lookup/user_topk/{strange}", f"/v1/lookup/{strange}/x?token={strange}"):
            headers = {"Authorization": f"Bearer {strange}", "X-Request-Id": strange}
            texts.append(client.get(service.url + path, headers=headers).text)
        default = {"Authorization": "Bearer sesame-sesame"}
        for path in ("/metrics", "/openapi.json", "/readyz", "/dashboard/data", "/v1/generations"):
            texts.append(client.get(service.url + path, headers=default).text)
    log = service.log.read_text()
    everything = "\n".join([log, *texts, token_file.path.read_text()])
    secret_tokens = [*token_file.tokens.values(), "sesame-sesame"]
    assert [secret for secret in secret_tokens if secret in everything] == [] and strange not in log
    for name in ("read", "score", "rare", "default"):
        assert f'"token":"{name}"' in log, name
    assert service.series("larder_token_requests_total")["default",] >= 2
