"""What commands say when what was asked cannot be done: each names what to do instead."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.control.control_keys import Control
from cache.control.states import GenerationState, demand_allowed
from cache.errors import ConfigError, Conflict, CorruptArtefact
from cache.l2.sync_clients import connect
from cache.process.redis_server import RedisServer
from cache.store.audit import audit_records
from cache.store.releases import all_releases
from precompute.cli import commands
from precompute.cli.parser import build_command_parser
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig
from precompute.erasure import erasing
from precompute.releases.release_log import open_releases
from precompute.steps import verify, warm
from precompute.traffic.canary import trial
from tests.integration.nights import DATA_UNTIL, NEXT, build_verified, prepare, publish

BLANK = ("", "  ", None)


@pytest.fixture(scope="module")
def nights_of(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[NightConfig, str, str]:
    """A superseded night and the live one after it."""
    config = prepare(tmp_path_factory.mktemp("shell") / "n", redis_url, users=150, items=60)
    generations = []
    for data_until in (DATA_UNTIL, NEXT):
        generations.append(build_verified(config, data_until))
        publish(config, generations[-1])
    return replace(config, warm_timeout_s=0.3), generations[0], generations[1]


@pytest.fixture
def tried(nights_of: tuple[NightConfig, str, str]) -> Iterator[tuple[NightConfig, str]]:
    """A canary that runs."""
    config = nights_of[0]
    generation = build_verified(config, "2026-01-31T00:00:00Z")
    trial.start(config, generation, percent=5.0, attempt=f"start-{time.time()}")
    yield config, generation
    with connect(config.redis_url, 5.0) as client:
        pointer = Control(client, config.keyspace()).read_pointer()
    if pointer is not None and pointer.canary is not None:
        trial.abandon(config, reason="over", attempt=f"end-{time.time()}")


def run(config: NightConfig, *line: str) -> Any:
    arguments = build_command_parser().parse_args(line)
    return arguments.run.import_command()(config, arguments, quiet)


def test_a_canary_is_ended_only_under_its_own_name(tried: tuple[NightConfig, str]) -> None:
    config, generation = tried
    other_generation = f"20260101T000000Z-{'0' * 12}"
    for line in (
        ("canary", "publish", other_generation),
        ("canary", "abandon", other_generation, "--reason", "the wrong one named"),
    ):
        with pytest.raises(Conflict, match=f"the running one is {generation}"):
            run(config, *line)
    with connect(config.redis_url, 5.0) as client:
        pointer = Control(client, config.keyspace()).read_pointer()
    assert pointer is not None and pointer.canary is not None
    assert pointer.canary.generation == generation != pointer.generation

    abandon_result = run(config, "canary", "abandon", generation, "--reason", "enough")
    audit_record = audit_records(config.store())[-1]
    assert (audit_record.action, audit_record.subject) == ("canary_abandon", generation)
    assert (audit_record.reason, audit_record.outcome) == ("enough", "done")
    assert abandon_result["generation"] == generation
    with pytest.raises(Conflict, match="cannot start a canary of"):
        run(config, "canary", "start", generation)


def test_a_reason_that_says_nothing_is_refused_everywhere(nights_of: tuple[NightConfig, str, str]) -> None:
    config, old, _ = nights_of
    release_count = len(all_releases(config.store()))
    for blank in BLANK:
        reason = blank or ""
        for refused in (
            lambda reason=reason: run(config, "pin", old, "--reason", reason),
            lambda reason=reason: run(config, "roll-back", "--reason", reason),
            lambda reason=reason: run(config, "canary", "abandon", "--reason", reason),
            lambda reason=reason: run(config, "restore", "--adopt", "--reason", reason),
            lambda reason=reason: erasing.readmit_entity(
                config.store(), b"u1", "user", forgotten_at=0.0, reason=reason
            ),
        ):
            with pytest.raises(ConfigError, match="reason"):
                refused()
    assert len(all_releases(config.store())) == release_count


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf"])
def test_a_pin_lasts_for_a_time_above_nothing(nights_of: tuple[NightConfig, str, str], days: str) -> None:
    config, old, _ = nights_of
    with pytest.raises(ConfigError, match="days"):
        run(config, "pin", old, "--reason", "x", f"--days={days}")


def test_what_is_not_pinned_is_not_unpinned(nights_of: tuple[NightConfig, str, str]) -> None:
    config, old, _ = nights_of
    run(config, "pin", old, "--reason", "x", "--days", "1")
    run(config, "unpin", old)
    with pytest.raises(Conflict, match="not pinned"):
        run(config, "unpin", old)


def test_two_nights_of_the_same_inputs_may_verify_at_once(
    nights_of: tuple[NightConfig, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a generation that another night publishes while its gates run
    config = nights_of[0]
    generation = build_verified(config, "2026-02-02T00:00:00Z")
    judge = verify._judge

    def judge_and_publish(*arguments: Any) -> Any:
        verdicts = judge(*arguments)
        publish(config, generation)
        return verdicts

    monkeypatch.setattr(verify, "_judge", judge_and_publish)

    # When it is verified
    verify_result = verify.run(config, {"generation": generation})

    # Then that is done, too
    assert verify_result["verified"] and "it is live" in verify_result["not_run"]
    roll_back_target = nights_of[2]
    run(config, "roll-back", "--reason", "x", "--to", roll_back_target)


def test_verify_says_what_it_did_not_run(nights_of: tuple[NightConfig, str, str]) -> None:
    config, old, live = nights_of
    verify_result = verify.run(config, {"generation": live})
    assert (
        verify_result["verified"] and verify_result["gates"] == 0 and "every page was read" in verify_result["not_run"]
    )
    verify_result = verify.run(config, {"generation": old})
    assert not verify_result["verified"] and verify_result["gates"] == 0 and "superseded" in verify_result["not_run"]

    page = config.keyspace().page(live, "user_topk", 0)
    with connect(config.redis_url, 5.0) as client:
        sound: Any = client.get(page)
        client.setrange(page, 7, b"zzzz")
        try:
            with pytest.raises(CorruptArtefact, match="restore"):
                verify.run(config, {"generation": live})
        finally:
            client.set(page, sound)


def test_a_superseded_one_is_gone_back_to(nights_of: tuple[NightConfig, str, str]) -> None:
    config, old, _ = nights_of
    with pytest.raises(Conflict, match=f"roll-back --to {old}"):
        run(config, "publish", old)


def test_every_refused_step_of_a_state_says_what_to_do_about_it() -> None:
    with pytest.raises(Conflict, match="verify G"):
        demand_allowed("publish", "G", GenerationState.REFUSED)
    with pytest.raises(Conflict, match=r"start a canary of G.*verify G"):
        demand_allowed("canary", "G", GenerationState.REFUSED)
    with pytest.raises(Conflict, match="load G"):
        demand_allowed("verify", "G", GenerationState.BEGUN)
    with pytest.raises(Conflict, match="status"):
        demand_allowed("publish", "G", None)


def test_warm_fails_for_what_is_not_live_and_while_replicas_wait(nights_of: tuple[NightConfig, str, str]) -> None:
    config, old, live = nights_of
    assert run(config, "warm", live)["waiting"] == []
    for other_generation in (old, "zzz"):
        with pytest.raises(Conflict, match=f"{other_generation} is not live, {live} is"):
            run(config, "warm", other_generation)
    with open_releases(config) as releases:
        client = releases.control.client
        payload = orjson.dumps({"replica": "slow", "serving": old, "holds": [old]})
        client.zadd(config.keyspace().replicas, {payload: releases.control.time()})
    with pytest.raises(Conflict, match=r"1 of 1 replicas.*: slow;"):
        run(config, "warm", live)
    # A slow replica fails no night.
    assert warm.run(config, {"generation": live})["waiting"] == ["slow"]
    with open_releases(config) as releases:
        releases.control.client.delete(config.keyspace().replicas)


def test_the_commands_are_those_of_the_parser() -> None:
    assert build_command_parser().parse_args(["warm", "x"]).run.import_command() is commands.warm


def test_a_roll_back_that_cannot_mend_says_that_readers_have_moved(tmp_path: Path, own_redis: RedisServer) -> None:
    config = prepare(tmp_path / "n", own_redis.url, users=150, items=60)
    first = build_verified(config, DATA_UNTIL)
    publish(config, first)
    publish(config, build_verified(config, NEXT))
    page = config.keyspace().page(first, "user_topk", 0)
    with connect(config.redis_url, 5.0) as client:
        sound: Any = client.get(page)
        client.setrange(page, 7, b"zzzz")
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)

        roll_back_result = run(config, "roll-back", "--reason", "bad")

        assert roll_back_result["changed"] and roll_back_result["generation"] == first
        assert "maxmemory" in roll_back_result["unmended"] and "restore" in roll_back_result["next"]
        client.config_set("maxmemory", 0)
        run(config, "restore")
        assert client.get(page) == sound
