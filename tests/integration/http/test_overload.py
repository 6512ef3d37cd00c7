"""A real service with far more to do than it can: it leaves inference out, says so, and is itself again afterwards."""

import asyncio
import contextlib
import itertools
import re
import select
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from precompute.config.settings import NightConfig
from tests.integration.nights import build_night, environment, histories
from tests.integration.program import started
from tests.integration.serving_app import eventually

CALLERS, ROUNDS, ENTITIES = 64, 4, 100
CROWDS_MAX = 9
CALM_REQUESTS, CALM_MAX = 40, 5
SHED = re.compile(r'larder_shed_total{stage="live"} (\d+)')


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("overload"), redis_url)


class Strangers:
    """Requests for unknown users that never repeat, each with a history."""

    def __init__(self, night: NightConfig) -> None:
        history_by_user = histories(night)
        self.known_path = f"/v1/lookup/user_topk/{min(history_by_user)}?k=5"
        self._items = sorted({item for history in history_by_user.values() for item in history})
        self._numbers = itertools.count()

    def body(self, entities: int) -> dict[str, Any]:
        number = next(self._numbers)
        history = [self._items[(number * 7 + step * 3) % len(self._items)] for step in range(8)]
        stranger_entities = [
            {"id": f"stranger-{number}-{index}", "history": history[: 1 + index % 8]} for index in range(entities)
        ]
        return {"entities": stranger_entities, "k": 5}


@contextlib.asynccontextmanager
async def asking(url: str) -> AsyncIterator[httpx.AsyncClient]:
    # Expire connections well before the 5 s after which the service closes them: both at once would be a reset.
    limits = httpx.Limits(max_connections=CALLERS, max_keepalive_connections=CALLERS, keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        yield http


async def crowd(http: httpx.AsyncClient, strangers: Strangers) -> list[httpx.Response]:
    """Run callers that send again as soon as they are answered; return their responses."""
    responses: list[httpx.Response] = []

    async def call() -> None:
        for _ in range(ROUNDS):
            body = strangers.body(ENTITIES)
            responses.append(await http.post("/v1/lookup/user_topk", json=body))

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return responses


def sources(responses: list[httpx.Response]) -> Counter[tuple[str, str | None]]:
    """`source` and `live` of every answer; each has its items and its generation."""
    answer_counts: Counter[tuple[str, str | None]] = Counter()
    for response in responses:
        if response.status_code == 200:
            answers = response.json()["answers"]
            assert len(answers) == ENTITIES
            for answer in answers:
                assert len(answer["items"]) == 5 and answer["generation"]
                answer_counts[answer["source"], answer.get("live")] += 1
    return answer_counts


async def test_overload_goes_down_the_ladder_says_so_and_ends(night: NightConfig, tmp_path: Path) -> None:
    environ = environment(night, LARDER_QUEUE_TARGET_MS="5", LARDER_QUEUE_INTERVAL_MS="50")
    strangers = Strangers(night)
    with started(environ, tmp_path / "service.log") as (_, url):
        async with asking(url) as http:
            responses = await crowd(http, strangers)
            for _ in range(CROWDS_MAX):  # where callers get less of the processor than the service
                if ("default", "overloaded") in sources(responses):
                    break
                responses += await crowd(http, strangers)
        async with asking(url) as http:
            stored_response = await http.get(strangers.known_path)
            shed = int(SHED.findall((await http.get("/metrics")).text)[0])

            async def is_calm() -> bool:
                late_responses = [await http.post("/v1/lookup", json=only(strangers)) for _ in range(20)]
                if refusals := [response for response in late_responses if response.status_code != 200]:
                    assert all(map(is_honest, refusals))
                    return False
                return {response.json()["answers"][0]["source"] for response in late_responses} == {"live"}

            recovered = await eventually(is_calm, timeout_s=60)
            metrics = (await http.get("/metrics")).text

    answer_counts = sources(responses)
    refused = [response for response in responses if response.status_code != 200]
    assert all(is_honest(response) for response in refused)
    assert {source for source, _ in answer_counts} == {"live", "default"}
    assert {live for source, live in answer_counts if source == "default"} <= {
        "overloaded", "timeout", "busy",
    }  # fmt: skip
    assert shed >= answer_counts["default", "overloaded"] > 0
    assert stored_response.json()["source"] in ("l1", "l2")
    assert recovered and "larder_requests_under_way 0.0" in metrics


def only(strangers: Strangers) -> dict[str, Any]:
    """One more of them, for any table."""
    body = strangers.body(1)
    return body | {"entities": [body["entities"][0] | {"table": "user_topk"}]}


def is_honest(response: httpx.Response) -> bool:
    """Return whether a refusal gives its reason and a time to retry."""
    error = response.json()["error"]
    return (
        (response.status_code, error["code"]) == (503, "overloaded")
        and bool(error["message"])
        and response.headers["retry-after"] == "1"
    )


def ask_by_hand(url: str, path: str, *, more: bytes = b"", trickle: bool = False) -> bytes:
    """All that comes back on one connection until it is closed, for a body that never becomes whole."""
    where = urlsplit(url)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode()
    received = b""
    with socket.create_connection((where.hostname, where.port), timeout=30) as wire:
        wire.sendall(head + more)
        while trickle and not select.select([wire], [], [], 0.02)[0]:
            wire.sendall(b" ")
        with contextlib.suppress(ConnectionResetError):  # what trickled in last is not read
            while piece := wire.recv(1 << 16):
                received += piece
    return received


async def test_a_body_that_does_not_come_costs_its_place_for_a_bounded_time(night: NightConfig, tmp_path: Path) -> None:
    environ = environment(night, LARDER_REQUESTS_MAX="1", LARDER_BODY_TIMEOUT_S="0.3")
    strangers, table = Strangers(night), "/v1/lookup/user_topk"
    with started(environ, tmp_path / "service.log") as (_, url):
        no_body_reply = await asyncio.to_thread(ask_by_hand, url, table)
        half = await asyncio.to_thread(ask_by_hand, url, table, more=b'{"entities":')
        slow = await asyncio.to_thread(ask_by_hand, url, table, trickle=True)
        scored = await asyncio.to_thread(ask_by_hand, url, "/v1/score")
        async with asking(url) as http:
            after = await http.get(strangers.known_path)
            metrics = (await http.get("/metrics")).text

    for reply in (no_body_reply, half, slow, scored):
        assert reply.startswith(b"HTTP/1.1 408 ") and b'"code":"body_timeout"' in reply
        assert b"connection: close" in reply.lower()
    assert after.status_code == 200 and "larder_requests_under_way 0.0" in metrics
    for route, count in (("any", 3), ("POST /v1/score", 1)):
        assert f'larder_requests_total{{route="{route}",status="408"}} {count}.0' in metrics


async def test_beyond_the_most_requests_are_refused_with_a_time_to_come_again(
    night: NightConfig, tmp_path: Path
) -> None:
    environ = environment(night, LARDER_REQUESTS_MAX="2")
    strangers = Strangers(night)
    with started(environ, tmp_path / "service.log") as (_, url):
        async with asking(url) as http:
            responses = await crowd(http, strangers)
        async with asking(url) as http:
            health, after = await http.get("/healthz"), await http.get(strangers.known_path)

    refused = [response for response in responses if response.status_code != 200]
    assert refused and all(is_honest(response) for response in refused)
    assert sum(sources(responses).values()) == (len(responses) - len(refused)) * ENTITIES
    assert (health.status_code, after.status_code) == (200, 200)


async def test_without_load_and_as_it_is_set_by_default_nothing_is_refused(night: NightConfig, tmp_path: Path) -> None:
    known_users = sorted(histories(night))
    strangers = Strangers(night)
    with started(environment(night), tmp_path / "service.log") as (_, url):
        async with asking(url) as http:
            for _ in range(CALM_MAX):  # where others load the machine, a round of them may be late
                responses = []
                for number in range(CALM_REQUESTS):
                    user, batch = (known_users[number % len(known_users)], {"entities": known_users[:10], "k": 5})
                    responses.append(await http.get(f"/v1/lookup/user_topk/{user}?k=5"))
                    responses.append(await http.get(f"/v1/lookup/user_topk/nobody-{number}?k=5"))
                    responses.append(await http.post("/v1/lookup/user_topk", json=batch))
                    responses.append(await http.post("/v1/lookup", json=only(strangers)))
                if is_calm := {response.status_code for response in responses} == {200}:
                    break

    assert is_calm, Counter(response.status_code for response in responses)
    left_out = Counter(response.json()["answers"][0].get("live") for response in responses[3::4])
    assert left_out["overloaded"] < CALM_REQUESTS / 2
