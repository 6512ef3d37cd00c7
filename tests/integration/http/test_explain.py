"""`/v1/explain` and `python -m serving explain`: which rung would answer, shown without changing anything."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import orjson
import pytest
import redis

from cache.process.redis_server import RedisServer
from cache.store.blocklist import change_blocklist
from precompute.config.settings import NightConfig
from serving.explain import cli
from serving.explain.cli import main
from serving.explain.explainer import EXPLANATIONS_MAX, Explainer
from tests.attached import attached
from tests.integration.nights import (
    DATA_UNTIL,
    NEXT,
    K,
    build_night,
    histories,
    prepare,
    publish_night,
    top_lists,
)  # fmt: skip
from tests.integration.program import ROOT, environment, started
from tests.integration.serving_app import Running, eventually, serving
from tests.openapi_document import resolved

EXPLAIN, LOOKUP = "/v1/explain/user_topk/", "/v1/lookup/user_topk/"


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("explained"), redis_url)


@pytest.fixture(scope="module")
def user(night: NightConfig) -> str:
    return min(histories(night))


async def counts(service: Running) -> dict[str, Any]:
    """Return all counts that an explanation must not change."""
    inner = service.service
    names = ("larder_answers_total", "larder_misses_total", "larder_entities_total")
    return {
        **{name: await service.scrape_samples(name) for name in names},
        "l1": (len(inner.tiers.local_tier), list(inner.tiers.local_tier._entries)),
        "negative": len(inner.tiers.negative_cache),
        "tiers": (inner.tiers.counters.result_total, inner.tiers.counters.l2_reads),
        "writes": inner.tiers.write_behind.stored_count,
        "recent": list(inner.ladder.recent_names),
    }


async def test_looking_shows_the_record_its_page_and_its_checksum_and_changes_nothing(
    night: NightConfig, user: str
) -> None:
    async with serving(night, sketch_s=0.0) as service:
        counts_before = await counts(service)
        cold = await service.get(EXPLAIN + user)
        assert await counts(service) == counts_before
        for _ in range(2):
            answer = await service.get(LOOKUP + user)
        counts_before = await counts(service)
        warm = await service.get(EXPLAIN + user)
        assert await counts(service) == counts_before

    generation = cold["generation"]
    assert cold["answer"] == {"tier": "l2", "reason": None, "live": None}
    assert warm["answer"]["tier"] == "l1" and warm["same_bytes"] is True
    assert cold["l1"] == {"found": False, "reason": "absent"} and cold["l2"]["found"]
    assert cold["page"]["state"] == "ok" and cold["page"]["checksum"] == cold["page"]["expected"]
    assert cold["page"]["key"].startswith(f"larder:1:{night.namespace}:g:{generation}:user_topk:")
    assert cold["directory"]["known"] and cold["record"]["by"] == "batch"
    assert tuple(cold["record"]["items"]) == top_lists(night, generation, [user])[user]
    assert (cold["record"]["items"], cold["record"]["scores"]) == (answer["items"], answer["scores"])
    assert cold["sentence"].startswith("Redis would answer (L2)")


async def test_every_page_is_found_and_sound(night: NightConfig) -> None:
    async with serving(night) as service:
        explanations = [await service.get(EXPLAIN + user_id) for user_id in sorted(histories(night))[::7]]
        items = await service.get("/v1/explain/item_similar/i-00003")

    assert {explanation["page"]["state"] for explanation in [*explanations, items]} == {"ok"}
    assert len({explanation["page"]["number"] for explanation in explanations}) > 2


async def test_the_model_says_what_it_would_from_a_history_and_the_difference_is_shown(
    night: NightConfig, user: str
) -> None:
    history = histories(night)[user]
    body = {"entities": [{"id": user, "history": history}]}
    async with serving(night) as service:
        explanation = await service.post("/v1/explain/user_topk", body)
        fresh = await service.post("/v1/lookup/user_topk", body | {"fresh": True})
        shorter = await service.post("/v1/explain/user_topk", {"entities": [{"id": user, "history": history[:1]}]})

    answer = fresh["answers"][0]
    assert answer["source"] == "live" and explanation["model"]["computed_from"] == "sent"
    assert explanation["model"]["items"] == answer["items"] and explanation["model"]["precision"] == "int8"
    assert explanation["answer"]["tier"] == "l2"
    difference = explanation["difference"]
    assert difference["overlap"] > 0.8 and difference["delta_max"] < 0.1 and difference["k"] == K
    assert set(difference["only_live"]) == set(answer["items"]) - set(explanation["record"]["items"])
    assert not shorter["difference"]["exact"] and shorter["difference"]["overlap"] < difference["overlap"]


async def test_without_a_history_the_stored_vector_says_how_the_stored_list_scores(
    night: NightConfig, user: str
) -> None:
    async with serving(night) as service:
        explanation = await service.get(EXPLAIN + user, k=10)

    assert explanation["model"]["computed_from"] == "stored_vector"
    assert explanation["difference"]["overlap"] == 1.0 and explanation["difference"]["delta_max"] < 0.01
    assert len(explanation["record"]["items"]) == 10


@pytest.mark.parametrize("table", ["item_similar", "item_vector"])
async def test_an_item_is_its_own_input(night: NightConfig, table: str) -> None:
    async with serving(night) as service:
        explanation = await service.get(f"/v1/explain/{table}/i-00003")

    assert explanation["model"]["computed_from"] == "own" and explanation["difference"] is not None
    assert explanation["difference"].get("overlap", 1.0) > 0.8


@pytest.mark.parametrize("table", ["user_vector", "user_affinity"])
async def test_numbers_are_compared_as_numbers(night: NightConfig, user: str, table: str) -> None:
    body = {"entities": [{"id": user, "history": histories(night)[user]}]}
    async with serving(night) as service:
        explanation = await service.post(f"/v1/explain/{table}", body)

    assert explanation["difference"]["cosine"] > 0.99 and explanation["record"]["count"] > 0


async def test_an_unknown_id_is_said_to_be_unknown(night: NightConfig) -> None:
    async with serving(night) as service:
        explanation = await service.get(EXPLAIN + "nobody")
        body = {"entities": [{"id": "nobody", "history": ["i-00001", "i-00002"]}]}
        live = await service.post("/v1/explain/user_topk", body)
        after = await service.get(LOOKUP + "nobody")
        repeated_explanation = await service.get(EXPLAIN + "nobody")  # remembered as unknown by now

    assert (
        repeated_explanation["answer"] == explanation["answer"] and repeated_explanation["l1"]["reason"] == "negative"
    )
    assert repeated_explanation["answer"]["reason"] == after["reason"]
    assert not explanation["directory"]["known"] and explanation["page"] is None and explanation["record"] is None
    assert explanation["answer"] == {"tier": "default", "reason": "not_in_generation", "live": None}
    assert explanation["default"]["items"] == after["items"]
    assert "did not know it" in explanation["sentence"] and "needs a history" in explanation["sentence"]
    assert live["answer"]["tier"] == "live" and len(live["model"]["items"]) > 0
    assert after["source"] == "default"  # what was computed for the explanation was kept nowhere


@pytest.mark.parametrize("fresh", [False, True])
async def test_what_is_demanded_and_excluded_counts_for_an_explanation_as_for_a_lookup(
    night: NightConfig, fresh: bool
) -> None:
    user = min(histories(night))
    async with serving(night) as service:
        stored_items = (await service.get(LOOKUP + user))["items"]
        entity = {"id": user, "history": ["i-00001", "i-00002"]}
        body = {"entities": [entity], "exclude": stored_items, "fresh": fresh}
        answer = (await service.post("/v1/lookup/user_topk", body))["answers"][0]
        explanation = await service.post("/v1/explain/user_topk", body)

    assert explanation["answer"]["tier"] == answer["source"] == ("live" if fresh else "l1")
    assert explanation["answer"]["reason"] == answer.get("reason")


async def test_a_stored_live_answer_is_shown_with_what_is_left_of_its_life(night: NightConfig) -> None:
    body = {"entities": [{"id": "overlaid", "history": ["i-00001", "i-00002"]}]}
    async with serving(night) as service:
        await service.post("/v1/lookup/user_topk", body)
        explanation = await service.get(EXPLAIN + "overlaid")
        changed_body = {"entities": [{"id": "overlaid", "history": ["i-00003"]}]}
        changed_explanation = await service.post("/v1/explain/user_topk", changed_body)

    assert explanation["answer"]["tier"] == "l1" and explanation["record"]["by"] == "live"
    assert 0 < explanation["l1"]["expires_in_seconds"] <= 600
    assert changed_explanation["answer"] == {"tier": "live", "reason": "input_changed", "live": None}


async def test_a_blocked_entity_gets_the_default_and_a_blocked_item_is_left_out(tmp_path: Path, redis_url: str) -> None:
    config = build_night(tmp_path, redis_url, users=60, items=40)
    first, second = sorted(histories(config))[:2]
    async with serving(config) as service:
        item = (await service.get(EXPLAIN + second))["record"]["items"][0]
        change_blocklist(config.store(), block_entities=[first.encode()], block_items=[item.encode()])

        async def is_blocked() -> bool:
            return bool((await service.get(EXPLAIN + first))["answer"]["reason"] == "entity_blocked")

        assert await eventually(is_blocked)
        sent_body = {"entities": [{"id": first, "history": [item]}]}
        sent_explanation = await service.post("/v1/explain/user_topk", sent_body)
        assert sent_explanation["answer"] == {"tier": "default", "reason": "entity_blocked", "live": None}
        first_explanation, second_explanation = (
            await service.get(EXPLAIN + first),
            await service.get(EXPLAIN + second),
        )
        answer = await service.get(LOOKUP + first)

    assert first_explanation["answer"]["tier"] == "default" == answer["source"]
    assert item not in second_explanation["record"]["items"] and second_explanation["answer"]["tier"] == "l2"


async def test_damage_in_redis_is_found(tmp_path: Path, own_redis: RedisServer) -> None:
    config = prepare(tmp_path / "night", own_redis.url, users=60, items=40)
    publish_night(config, DATA_UNTIL)
    publish_night(config, NEXT)
    users = sorted(histories(config))
    with redis.Redis.from_url(own_redis.url) as client:
        async with serving(config) as service:

            async def holds_both() -> bool:
                return (await service.get("/v1/generations"))["previous"] is not None

            assert await eventually(holds_both)
            page = (await service.get(EXPLAIN + users[0]))["page"]
            client.setrange(page["key"], page["offset_bytes"] + 20, b"\x01\x00\x00\x00")
            damaged = await service.get(EXPLAIN + users[0])
            client.setrange(page["key"], page["offset_bytes"], b"\xff" * 8)
            corrupt = await service.get(EXPLAIN + users[0])
            corrupt_answer = await service.get(LOOKUP + users[0])
            client.delete(page["key"])
            missing = await service.get(EXPLAIN + users[0])

    assert damaged["page"]["state"] == "damaged" and damaged["answer"]["tier"] == "l2"
    assert "run larder restore" in damaged["sentence"]
    assert corrupt["l2"] == {"found": False, "reason": "corrupt"}
    assert corrupt["answer"] == {"tier": "previous", "reason": "corrupt", "live": None}
    assert corrupt_answer["source"] == "previous" and corrupt["previous"]["found"]
    assert missing["l2"]["reason"] == "page_missing" == missing["page"]["state"]
    assert missing["answer"]["tier"] == "previous"


async def test_with_redis_away_it_says_who_answers_instead(tmp_path: Path, own_redis: RedisServer) -> None:
    config = build_night(tmp_path / "night", own_redis.url, users=60, items=40)
    users = sorted(histories(config))
    async with serving(config) as service:
        await service.get(LOOKUP + users[0])
        with redis.Redis.from_url(own_redis.url) as client:
            client.shutdown(nosave=True)
        warm = await service.get(EXPLAIN + users[0])
        cold = await service.get(EXPLAIN + users[1])
        body = {"entities": [{"id": users[1], "history": histories(config)[users[1]]}]}
        live = await service.post("/v1/explain/user_topk", body)
        answers = [await service.get(LOOKUP + user_id) for user_id in users[:2]]
        lookup_response = await service.post("/v1/lookup/user_topk", body)
        later_explanation = await service.post("/v1/explain/user_topk", body)

    assert warm["answer"]["tier"] == "l1" and "Redis" in warm["sentence"].partition(";")[2]
    assert cold["answer"]["tier"] == "default" and cold["page"]["state"] in REDIS_DOWN_REASONS
    assert cold["answer"]["reason"] in REDIS_DOWN_REASONS and cold["page"]["expected"] is not None
    assert live["answer"]["tier"] == "live"
    assert [answer["source"] for answer in answers] == ["l1", "default"]
    assert lookup_response["answers"][0]["source"] == "live"  # and stands in while Redis is away
    assert later_explanation["answer"]["tier"] == "l1" and later_explanation["answer"]["reason"] in REDIS_DOWN_REASONS


REDIS_DOWN_REASONS = ("l2_down", "l2_timeout", "breaker_open")


async def test_what_cannot_be_explained_is_refused_like_any_request(night: NightConfig, user: str) -> None:
    async with serving(night, token="secret") as service:
        assert (await service.http.get(EXPLAIN + user)).status_code == 401
        service.http.headers["Authorization"] = "Bearer secret"
        table = await service.http.get("/v1/explain/nothing/x")
        two = await service.http.post("/v1/explain/user_topk", json={"entities": ["a", "b"]})
        unknown_generation_response = await service.http.get(EXPLAIN + user, params={"generation": "x"})
        document = (await service.http.get("/openapi.json")).json()
        attached(service.service, Explainer)._under_way_count = EXPLANATIONS_MAX
        busy = await service.http.get(EXPLAIN + user)
        attached(service.service, Explainer)._under_way_count = 0
        service.service.admission.requests_max = 0
        full = await service.http.get(EXPLAIN + user)

    assert (table.status_code, table.json()["error"]["code"]) == (404, "unknown_table")
    assert (two.status_code, unknown_generation_response.status_code) == (422, 409)
    assert [response.json()["error"]["code"] for response in (busy, full)] == ["overloaded"] * 2
    for path, method in (("/v1/explain/{table}/{entity}", "get"), ("/v1/explain/{table}", "post")):
        described = document["paths"][path][method]
        assert described["security"]
        assert "sentence" in str(
            resolved(document, described["responses"]["200"]["content"]["application/json"]["schema"])
        )


def test_the_command_shows_it_all_and_says_what_is_wrong(
    night: NightConfig, user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    history = tmp_path / "history"
    history.write_text("\n".join(histories(night)[user]))
    environ = environment(night, tmp_path, REDIS_URL=str(night.redis_url), LARDER_TOKEN="secret")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    monkeypatch.delenv("LARDER_TOKEN", raising=False)
    with started(environ) as (_, url):
        at = ("--url", url, "--token", "secret")
        code, stdout, _ = run(*at, "user_topk", user)
        assert code == 0 and user in stdout and "Redis would answer (L2)" in stdout
        for expected_term in ("checksum", "fingerprint", "directory", "overlap", "generation", "age"):
            assert expected_term in stdout
        code, stdout, _ = run(*at, "--json", "--history", f"@{history}", "user_topk", user)
        assert code == 0 and orjson.loads(stdout)["model"]["computed_from"] == "sent"
        code, stdout, _ = run(*at, "user_topk", "nobody")
        assert code == 0 and "did not know it" in stdout and "Default" in stdout
        assert run(*at, "--k", "3", "user_vector", user)[0] == 0
        code, _, wrong = run(*at, "nothing", user)
        assert code == 1 and "nothing" in wrong and "user_topk" in wrong
        code, _, wrong = run("--url", url, "user_topk", user)
        assert code == 1 and "LARDER_TOKEN" in wrong
        code, _, wrong = run(*at[2:], "--url", f"{url}/deeper", "user_topk", user)
        assert code == 1 and "--url" in wrong
        module = [sys.executable, "-m", "serving", "explain", "--url", url, "user_topk", user]
        completed_process = subprocess.run(
            module, env=os.environ | {"LARDER_TOKEN": "secret"}, cwd=ROOT, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert completed_process.returncode == 0 and "Redis would answer" in completed_process.stdout
    code, _, wrong = run(*at, "user_topk", user)
    assert code == 1 and "cannot be reached" in wrong and "secret" not in wrong
    assert "does it speak http, not https?" in wrong


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:99999", "http://host:port"])
def test_a_url_that_cannot_be_one_is_wrong_usage(url: str) -> None:
    with pytest.raises(SystemExit) as exc_info:
        main(["--url", url, "user_topk", "42"])
    assert exc_info.value.code == 2


def test_before_anything_is_published_it_says_what_to_do(
    tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = prepare(tmp_path / "night", redis_url, users=60, items=40)
    with started(environment(empty, tmp_path, REDIS_URL=redis_url)) as (_, url):
        code = main(["--url", url, "user_topk", "42"])
        assert httpx.get(f"{url}/healthz").status_code == 200

    assert code == 1 and "publish a generation" in capsys.readouterr().err


def test_on_a_terminal_the_same_is_shown_by_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    from cache.process import console as safe

    pieces: list[str] = []

    class Terminal(safe.SafeConsole):
        def __init__(self) -> None:
            super().__init__(force_terminal=True, width=100, record=True)

        def print(self, *renderables: Any, **more: Any) -> None:
            with self.capture() as capture:
                super().print(*renderables, **more)
            pieces.append(capture.get())

    monkeypatch.setattr(safe, "SafeConsole", Terminal)
    tier = {"found": False, "reason": "absent"}
    cli.print_explanation(
        {
            "table": "t", "id": "[red]", "sentence": "Redis would answer.", "generation": "g", "epoch": 1,
            "published_at": "p", "age_seconds": 3_700.0, "stale": None, "degraded": None,
            "answer": {"tier": "l2", "reason": None, "live": None}, "l1": tier, "l2": tier, "page": None,
            "directory": {"known": False, "position": None, "entities": 3, "hash": "0f"}, "same_bytes": None,
            "record": None, "previous": None, "difference": None,
            "model": {"computed_from": None, "reason": "no_model", "precision": None},
        }
    )  # fmt: skip
    text = "".join(pieces)

    assert "[red]" in text and "1 h 1 min" in text and "no_model" in text


async def test_headers_count_for_an_explanation_as_for_a_lookup(night: NightConfig, user: str) -> None:
    async with serving(night) as service:
        for headers in ({"X-Deadline-Ms": "soon"}, {"X-Larder-Canary-Key": "x" * 300}):
            responses = [
                await service.http.get(path + quote(user, safe=""), headers=headers) for path in (LOOKUP, EXPLAIN)
            ]
            responses.append(
                await service.http.post("/v1/explain/user_topk", json={"entities": [user]}, headers=headers)
            )
            assert [response.status_code for response in responses] == [422] * 3
            assert len({response.json()["error"]["field"] for response in responses}) == 1
