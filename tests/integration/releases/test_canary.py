"""A canary over three real replicas: whole requests of a stable share, compared, then published or abandoned."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from cache.config.night import CanaryConfig
from cache.control.states import GenerationState
from cache.errors import ConfigError, Conflict, Refused
from cache.traffic.split import KeySplit
from infra.local.service import ServiceProcess
from precompute.builds.build import data_until_of
from precompute.config.settings import NightConfig
from precompute.releases.recovery import roll_back
from precompute.traffic.canary import trial
from tests.http_connection import HttpConnection, get
from tests.integration.fleet import beating, control_of, fleet
from tests.integration.nights import build_night, build_verified, histories, publish
from tests.polling import poll_until

PERCENT = 30.0
KEYS = [f"key-{number}" for number in range(120)]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[tuple[NightConfig, list[ServiceProcess]]]:
    folder = tmp_path_factory.mktemp("canary")
    config = replace(
        build_night(folder / "night", redis_url, users=200, items=60),
        canary=CanaryConfig(wait_s=1.0, requests_min=20, keys_min=20, source_shift_max=0.5, score_psi_max=2.0),
    )
    with fleet(config, folder / "logs") as services:
        yield config, services


def verified(config: NightConfig) -> str:
    """A generation newer than all there were: older ones that were not published go when it begins."""
    with control_of(config) as control:
        newest_generation = max(control.rows())
    cut = datetime.fromtimestamp(data_until_of(newest_generation), UTC) + timedelta(minutes=30)
    return build_verified(config, cut.isoformat())


def live_of(config: NightConfig) -> str:
    with control_of(config) as control:
        pointer = control.read_pointer()
    assert pointer is not None
    return pointer.generation


def follow(config: NightConfig) -> None:
    """Waits until every replica is where the pointer is."""
    with control_of(config) as control:
        pointer = control.read_pointer()
    assert pointer is not None
    assert poll_until(lambda: {replica.pointer_epoch for replica in beating(config)} == {pointer.epoch})


async def post(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    async with HttpConnection(url) as connection:
        return await connection.request("POST", path, body)


async def look_up(
    service: ServiceProcess, entities: list[Any], status: int = 200, **options: Any
) -> list[dict[str, Any]]:
    body = orjson.dumps({"entities": entities, "k": 5, **options})
    response_status, raw = await post(service.url, "/v1/lookup/user_topk", body)
    assert response_status == status, raw
    answers: list[dict[str, Any]] = orjson.loads(raw).get("answers", [])
    return answers


async def generations(service: ServiceProcess, users: list[str]) -> dict[str, str]:
    """What answers each key; several entities each, so that a torn request would show."""
    generation_by_key = {}
    for key in KEYS:
        answers = await look_up(service, users, canary_key=key)
        (generation_by_key[key],) = {answer["generation"] for answer in answers}
    return generation_by_key


def start(config: NightConfig, generation: str, percent: float = PERCENT) -> None:
    trial.start(config, generation, percent=percent, attempt=f"start-{generation}-{percent}")
    follow(config)


async def test_a_canary_answers_its_share_whole_everywhere_alike_until_it_is_abandoned(
    served: tuple[NightConfig, list[ServiceProcess]],
) -> None:
    config, services = served
    live, tried = live_of(config), await asyncio.to_thread(verified, config)
    users = sorted(histories(config))[:3]

    await asyncio.to_thread(start, config, tried)
    generations_by_replica = [await generations(service, users) for service in services]

    # Replicas agree, and exactly the keys of the split get the canary.
    split = KeySplit.of(tried, PERCENT)
    assert generations_by_replica[0] == generations_by_replica[1] == generations_by_replica[2]
    assert generations_by_replica[0] == {key: tried if split.has_key(key.encode()) else live for key in KEYS}
    canary_fraction = PERCENT / 100
    canary_key_count = Counter(generations_by_replica[0].values())[tried]
    bound = 5 * math.sqrt(len(KEYS) * canary_fraction * (1 - canary_fraction))
    assert abs(canary_key_count - canary_fraction * len(KEYS)) < bound
    # Without a key the user's id decides; several users have no key; a pinned generation wins; the header counts too.
    user = next(user_id for user_id in sorted(histories(config)) if split.has_key(user_id.encode()))
    assert (await look_up(services[0], [user]))[0]["generation"] == tried
    assert {answer["generation"] for answer in await look_up(services[0], [user, users[0]])} == {live}
    assert (await look_up(services[0], [user], generation=live))[0]["generation"] == live
    assert (await look_up(services[0], users, generation=tried))[0]["generation"] == tried
    # Feedback is counted for its arm.
    feedback = {"event": "click", "generation": tried, "count": 3}
    assert await post(services[0].url, "/v1/feedback", orjson.dumps(feedback)) == (
        200, b'{"arm":"canary"}',
    )  # fmt: skip
    status = trial.status(config)
    assert status["holding"] == 3 and set(status["requests"]) == {"live", "canary"}
    _, text = await get(services[0].url, "/metrics")
    assert b'larder_canary_requests_total{arm="canary"}' in text

    await asyncio.to_thread(trial.abandon, config, reason="a test", attempt="abandon")
    await asyncio.to_thread(follow, config)

    assert set((await generations(services[1], users)).values()) == {live}
    assert await look_up(services[1], users, 409, generation=tried) == []
    assert poll_until(lambda: all(tried not in replica.held_generations for replica in beating(config)))
    with control_of(config) as control:
        assert control.rows()[tried].state is GenerationState.ABANDONED
    with pytest.raises(Conflict):
        publish(config, tried)
    # A retry finds its own work; any other caller is told that there is no canary to abandon.
    repeated_abandon = await asyncio.to_thread(trial.abandon, config, reason="a test", attempt="abandon")
    assert repeated_abandon["generation"] == tried
    with pytest.raises(Conflict, match="no canary"):
        await asyncio.to_thread(trial.abandon, config, reason="a test", attempt="another")


async def test_a_canary_that_does_well_is_published_and_one_that_was_not_asked_is_not(
    served: tuple[NightConfig, list[ServiceProcess]],
) -> None:
    config, services = served
    tried = await asyncio.to_thread(verified, config)
    users = sorted(histories(config))[:3]
    await asyncio.to_thread(start, config, tried, 50.0)
    for service in services:
        await generations(service, users)

    def has_enough_requests() -> bool:
        return bool(min(trial.status(config)["requests"].values()) > 100)

    assert await asyncio.to_thread(poll_until, has_enough_requests)
    assert await asyncio.to_thread(poll_until, lambda: trial.is_over(config, tried))
    print(trial.status(config))

    conclusion = await asyncio.to_thread(trial.publish_or_abandon, config, tried, attempt="conclude")
    await asyncio.to_thread(follow, config)

    assert conclusion["published"] and live_of(config) == tried
    # A retry finds its own work.
    assert trial.publish_or_abandon(config, tried, attempt="conclude")["published"]
    assert trial.is_over(config, tried)
    unasked = await asyncio.to_thread(verified, config)
    await asyncio.to_thread(start, config, unasked)
    with pytest.raises(Conflict, match="at least 20 are needed"):
        await asyncio.to_thread(trial.publish_or_abandon, config, unasked, attempt="conclude-2")
    # Without requests nothing is decided: the canary goes on, until waiting for it times out.
    assert not trial.is_over(config, unasked)
    patience = replace(config, canary=replace(config.canary, wait_max_s=1.0))
    assert await asyncio.to_thread(poll_until, lambda: trial.is_over(patience, unasked))
    with control_of(config) as control:
        pointer = control.read_pointer()
        assert pointer is not None and pointer.canary is not None
        assert (pointer.generation, pointer.canary.generation) == (tried, unasked)
    await asyncio.to_thread(trial.abandon, config, reason="a test", attempt="conclude-2")
    with pytest.raises(Refused, match="was abandoned"):
        await asyncio.to_thread(trial.publish_or_abandon, config, unasked, attempt="conclude-2")


async def test_starting_a_canary_that_runs_keeps_its_share_unless_another_is_named(
    served: tuple[NightConfig, list[ServiceProcess]],
) -> None:
    config, _ = served
    tried = await asyncio.to_thread(verified, config)
    await asyncio.to_thread(start, config, tried)

    repeated_start = await asyncio.to_thread(trial.start, config, None, attempt="again")
    ten_percent_start = await asyncio.to_thread(trial.start, config, tried, percent=10.0, attempt="other")

    assert repeated_start == {"generation": tried, "percent": PERCENT}
    assert ten_percent_start["percent"] == 10.0 and "counting restarts" in ten_percent_start["note"]
    with control_of(config) as control:
        pointer = control.read_pointer()
        assert pointer is not None and pointer.canary is not None
        assert pointer.canary.percent == 10.0
    await asyncio.to_thread(trial.abandon, config, reason="a test", attempt="enough")


async def test_what_may_not_be_published_is_not_tried_out_either(
    served: tuple[NightConfig, list[ServiceProcess]],
) -> None:
    config, _ = served
    live = live_of(config)

    with pytest.raises(Conflict, match="no canary is running"):
        trial.status(config)
    with pytest.raises(Conflict):
        trial.start(config, live, attempt="live")
    with pytest.raises(Conflict, match="no generation is verified"):
        trial.start(config, None, attempt="none")
    with pytest.raises(ConfigError, match="percent"):
        trial.start(config, live, percent=0.0, attempt="nothing")


async def test_a_publish_ends_a_canary_and_a_rollback_does_too(
    served: tuple[NightConfig, list[ServiceProcess]],
) -> None:
    config, services = served
    first, tried = live_of(config), await asyncio.to_thread(verified, config)
    users = sorted(histories(config))[:3]
    await asyncio.to_thread(start, config, tried, 100.0)
    assert set((await generations(services[0], users)).values()) == {tried}

    await asyncio.to_thread(trial.publish, config, attempt="publish")
    await asyncio.to_thread(follow, config)
    assert (await look_up(services[0], users))[0]["generation"] == tried
    newer_generation = await asyncio.to_thread(verified, config)
    await asyncio.to_thread(start, config, newer_generation, 100.0)
    await asyncio.to_thread(roll_back, config, target_generation=None, reason="a test", attempt="roll-back")
    await asyncio.to_thread(follow, config)

    assert set((await generations(services[2], users)).values()) == {first}
