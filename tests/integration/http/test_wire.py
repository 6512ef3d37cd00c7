"""A real service over keep-alive connections: what is answered past uvicorn is what callers got before, and counts."""

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from precompute.config.settings import NightConfig
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started

TOKEN = "sesame"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url)


@pytest.fixture(scope="module", params=["on", "off"])
def fast_http(request: pytest.FixtureRequest) -> str:
    """Whether connections answer lookups themselves."""
    return str(request.param)


@pytest.fixture(scope="module")
def url(night: NightConfig, tmp_path_factory: pytest.TempPathFactory, fast_http: str) -> Iterator[str]:
    state = tmp_path_factory.mktemp("state")
    environ = environment(night, state, LARDER_TOKEN=TOKEN, LARDER_FAST_HTTP=fast_http)
    with started(environ) as (_, service_url):
        yield service_url


class Caller:
    """One connection, which sends the same headers with every request."""

    def __init__(self, url: str, **more: str) -> None:
        self.request_headers = {**HEADERS, **more}
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        self.headers: dict[str, str] = {}

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON; the headers are in `headers`."""
        self._connection.request("GET", path, headers=self.request_headers)
        response = self._connection.getresponse()
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, json.loads(response.read())

    def get_stable_body(self, path: str) -> Any:
        """The body without what changes from request to request."""
        status, body = self.get(path)
        assert status == 200, body
        return {key: value for key, value in body.items() if key not in ("age_seconds", "source")}


def scrape_samples(url: str, name: str) -> dict[tuple[str, ...], float]:
    """Samples of a metric by label values."""
    text = httpx.get(f"{url}/metrics", headers=HEADERS).text
    return {
        tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_from_redis_from_memory_and_ready_it_is_the_same_answer(url: str, night: NightConfig, fast_http: str) -> None:
    users = sorted(histories(night))[:40]
    watched = {"x-request-id", "server-timing"} if fast_http == "off" else set()
    paths = [f"/v1/lookup/user_topk/{quote(user, safe='')}?k=7" for user in users]
    fresh = [Caller(url).get_stable_body(path) for path in paths[:20]]
    caller = Caller(url)
    requests_before = scrape_samples(url, "larder_requests_total")
    for _ in range(4):
        assert [caller.get_stable_body(path) for path in paths[:20]] == fresh
        assert set(caller.headers) - watched == {"date", "server", "content-length", "content-type"}
    cold = [caller.get_stable_body(path) for path in paths[20:]]  # from Redis, past uvicorn
    after = scrape_samples(url, "larder_requests_total")

    assert cold == [Caller(url).get_stable_body(path) for path in paths[20:]]
    route = ("GET /v1/lookup/{table}", "200")
    assert after[route] - requests_before[route] == 4 * 20 + 20
    answers, entities = (scrape_samples(url, f"larder_{name}_total") for name in ("answers", "entities"))
    assert sum(answers.values()) == sum(entities.values())
    seconds = scrape_samples(url, "larder_answer_seconds_count")
    assert sum(seconds.values()) == sum(scrape_samples(url, "larder_entities_total").values())


def test_wrong_requests_get_the_same_messages(url: str, night: NightConfig) -> None:
    user = quote(min(histories(night)), safe="")
    good = f"/v1/lookup/user_topk/{user}"
    wrong = [
        f"{good}?k=0", f"{good}?k=many", f"/v1/lookup/nothing/{user}", "/v1/lookup/user_topk/nobody",
        "/v1/lookup/user_topk/", f"{good}?unknown=1", "/v1/lookup/user_topk/%ff",
    ]  # fmt: skip
    caller = Caller(url)
    for _ in range(3):
        caller.get_stable_body(good)
    for path in wrong:
        status, body = caller.get(path)
        expected_status, expected = Caller(url).get(path)
        for answer in (body, expected):
            answer.pop("age_seconds", None)
        assert (status, body) == (expected_status, expected), path
        caller.get_stable_body(good)


def test_a_connection_without_the_token_learns_nothing_however_often_it_asks(url: str, night: NightConfig) -> None:
    path = f"/v1/lookup/user_topk/{quote(min(histories(night)), safe='')}"
    caller, stranger = Caller(url), Caller(url, Authorization="Bearer sesam")
    for _ in range(4):
        caller.get_stable_body(path)
        assert stranger.get(path)[0] == 401


def test_headers_that_change_on_a_connection_are_read_for_every_request(url: str, night: NightConfig) -> None:
    path = f"/v1/lookup/user_topk/{quote(min(histories(night)), safe='')}"
    caller = Caller(url)
    for _ in range(3):
        caller.get_stable_body(path)
    caller.request_headers["X-Deadline-Ms"] = "soon"
    for _ in range(3):
        assert caller.get(path)[0] == 422
    caller.request_headers["X-Deadline-Ms"] = "1000"
    caller.request_headers["X-Request-Id"] = "mine"
    for _ in range(3):
        caller.get_stable_body(path)
