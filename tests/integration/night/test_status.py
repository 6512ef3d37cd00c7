"""`larder status`: what it shows, what it calls a problem, and what it still knows without Redis."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
import redis

from cache.config.events import EventsConfig
from cache.control.states import GenerationState
from cache.errors import BundleError, ConfigError, LarderError
from cache.events.event import Event
from cache.format.manifest import CUT_CHARS
from cache.l2.sync_clients import connect
from cache.process.redis_server import RedisServer, join_or_start_server, running_server
from precompute import __main__ as shell
from precompute.cli.status import (
    PROBLEM_BY_STALE_REASON,
    STALE_REASONS_WITHOUT_LINE,
    read_state,
    render_status,
    report_status,
)
from precompute.cli.temporary_redis import open_redis_for_command
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig
from precompute.releases import moves
from precompute.releases.release_log import open_releases
from precompute.steps import index, take_events
from precompute.steps.night import Night, run_night
from serving.requests.reasons import StaleReason
from tests.integration.nights import DATA_UNTIL, NEXT, build_verified, prepare, publish_night
from tests.polling import poll_until

SOON = {"schedule": "* * * * *", "schedule_grace_s": 86_400.0}


@pytest.fixture
def config(tmp_path: Path, own_redis: RedisServer) -> NightConfig:
    return prepare(tmp_path / "night", own_redis.url, users=60, items=40)


@contextmanager
def served(config: NightConfig, generation: str) -> Iterator[None]:
    """A replica's heartbeat, in its eyes."""
    with open_releases(config) as releases:
        client, key = releases.control.client, config.keyspace().replicas
        beat = orjson.dumps({"replica": "there", "serving": generation, "holds": [generation]})
        client.zadd(key, {beat: releases.control.time()})
        yield
        client.zrem(key, beat)


def make_report(config: NightConfig) -> dict[str, Any]:
    """The report, as JSON has it, also shown once."""
    status_report = report_status(config, read_state(config))
    render_status(status_report)
    report_json: dict[str, Any] = orjson.loads(orjson.dumps(status_report))
    return report_json


def find_generation(status_report: dict[str, Any], generation: str) -> dict[str, Any]:
    (generation_report,) = [row for row in status_report["generations"] if row["generation"] == generation]
    return dict(generation_report)


def run(config: NightConfig, *arguments: str) -> int:
    base = Path(config.base)
    (base / "larder.toml").write_text(
        f'namespace = "{config.namespace}"\nartifacts = "artifacts"\nstate = "state"\nbundle = "bundle"\n'
        f'redis_url = "{config.redis_url}"\nredis_timeout_s = 1.0\n'
    )
    return shell.main(["--config", str(base / "larder.toml"), "--quiet", "status", *arguments])


def test_generations_with_their_sizes_gates_pins_and_the_next_one_expected(config: NightConfig) -> None:
    first, second = publish_night(config, DATA_UNTIL), publish_night(config, NEXT)
    with open_releases(config) as releases:
        releases.pin(first, reason="kept", expires_at=releases.clock() + 3_600, attempt="p")
    with served(config, second):
        status_report = make_report(config)

    assert status_report["well"] and status_report["problems"] == []
    assert (status_report["live"], status_report["previous"]) == (second, first)
    live, previous = find_generation(status_report, second), find_generation(status_report, first)
    assert (live["state"], previous["state"]) == ("live", "superseded")
    assert live["roles"] == ["live"] and previous["roles"] == ["previous"]
    assert previous["pinned"] and previous["pinned_until"] and not live["pinned"]
    assert live["gates"]["run"] > 10 and live["gates"]["failed"] == []
    assert previous["gates"]["not_judged"] and "finite" not in previous["gates"]["not_judged"]
    assert status_report["published_at"] and status_report["model"]["name"]
    shown = "\n".join(map(str, render_status(status_report)[1:]))
    assert f"live: {second} since {status_report['published_at']}, model " in shown
    assert f"(sha256 {status_report['model']['sha256'][:12]})" in shown
    with connect(config.redis_url, 5.0) as client:
        names: list[bytes] = client.keys(f"larder:1:{config.namespace}:g:{second}:*")  # type: ignore[assignment]
        pages = [name for name in names if name.rpartition(b":")[2].isdigit()]
        redis_bytes = sum(client.strlen(name) for name in pages)
    assert live["redis_bytes"] == redis_bytes == sum(table["bytes"] for table in live["tables"].values())
    files = Path(config.base, "artifacts", config.namespace, "generations", second)
    on_disk = sum(path.stat().st_size for path in files.rglob("*") if path.is_file())
    assert 0.3 * on_disk < live["store_bytes"] <= on_disk
    assert live["data_until"] == NEXT
    schedule = status_report["schedule"]
    assert schedule["next"] < schedule["next_expected_by"] and not schedule["missing"]


def test_a_refused_newest_and_a_missing_one_are_problems(config: NightConfig) -> None:
    live = publish_night(config, DATA_UNTIL)
    coming = build_verified(config, NEXT)
    with open_releases(config) as releases, served(config, live):
        assert make_report(config)["well"]
        moves.refuse(releases, coming, reason="score_psi: 0.9", attempt="r")
        status_report = make_report(config)

    assert not status_report["well"] and status_report["live"] == live
    assert len(status_report["problems"]) == 1 and f"{coming} was refused" in status_report["problems"][0]

    later_state = replace(read_state(config), read_at=read_state(config).read_at + 3 * 86_400)
    problems = report_status(config, later_state)["problems"]
    assert any("is missing" in problem for problem in problems)


def test_a_refused_one_of_the_live_cut_is_a_problem_wherever_its_name_sorts(config: NightConfig) -> None:
    live = publish_night(config, DATA_UNTIL)
    older = f"20200101T000000Z-{'0' * 12}"
    earlier_generation = f"{live[:CUT_CHARS]}-{'0' * 12}"  # in `status` it stands below the live one
    with open_releases(config) as releases:
        for generation in (earlier_generation, older):
            releases.note(generation, GenerationState.LOADED)
            moves.refuse(releases, generation, reason="stale_lists", attempt=generation)

    with served(config, live):
        (problem,) = make_report(config)["problems"]
    assert problem.startswith(f"{earlier_generation} was refused: stale_lists; ")
    assert f"`larder verify {earlier_generation}`" in problem


def test_a_lost_pointer_and_a_replica_left_behind_are_problems(config: NightConfig) -> None:
    first, second = publish_night(config, DATA_UNTIL), publish_night(config, NEXT)
    with open_releases(config) as releases:
        beat = {"replica": "slow", "serving": first, "holds": [first], "failed": {second: "no disk"}}
        releases.control.client.zadd(config.keyspace().replicas, {orjson.dumps(beat): releases.control.time()})
        status_report = make_report(config)
        releases.control.client.delete(config.keyspace().live)
    assert any("slow cannot load" in problem and "no disk" in problem for problem in status_report["problems"])
    assert any(f"slow answers from {first}" in problem for problem in status_report["problems"])
    report_without_pointer = make_report(config)
    assert (
        any("lost its pointer" in problem for problem in report_without_pointer["problems"])
        and report_without_pointer["live"] == second
    )


def test_a_replica_without_its_live_model_is_a_problem(config: NightConfig) -> None:
    live = publish_night(config, DATA_UNTIL)
    with open_releases(config) as releases:
        beat = {"replica": "bare", "serving": live, "holds": [live], "ready": [live], "degraded": "no such locale"}
        releases.control.client.zadd(config.keyspace().replicas, {orjson.dumps(beat): releases.control.time()})
        status_report = make_report(config)

    (problem,) = status_report["problems"]
    assert problem.startswith("replica bare answers without its live model (no such locale)")
    assert [replica["degraded"] for replica in status_report["replicas"]] == ["no such locale"]


def test_status_says_each_stale_reason_once() -> None:
    assert PROBLEM_BY_STALE_REASON.keys() | STALE_REASONS_WITHOUT_LINE == set(StaleReason)
    assert not PROBLEM_BY_STALE_REASON.keys() & STALE_REASONS_WITHOUT_LINE


def test_what_a_replica_finds_wrong_with_itself_is_a_problem(config: NightConfig) -> None:
    live = publish_night(config, DATA_UNTIL)
    found = {"events": "their Redis is unreachable", "sonar": "no echo"}
    with open_releases(config) as releases:
        beat = {"replica": "hurt", "serving": live, "holds": [live], "ready": [live], "problems": found}
        releases.control.client.zadd(config.keyspace().replicas, {orjson.dumps(beat): releases.control.time()})
        status_report = make_report(config)

    assert status_report["problems"] == [
        "replica hurt does not accept events, or lacks some that were accepted: their Redis is unreachable",
        "replica hurt has a problem with sonar: no echo",  # of a newer release
    ]
    assert not status_report["well"] and status_report["replicas"][0]["problems"] == found


def test_a_lost_page_of_the_live_generation_is_a_problem(config: NightConfig) -> None:
    live = publish_night(config, DATA_UNTIL)
    with served(config, live), open_releases(config) as releases:
        assert make_report(config)["problems"] == []
        releases.control.client.delete(config.keyspace().page(live, "user_topk", 0))

        (problem,) = make_report(config)["problems"]

    assert problem.startswith(f"Redis lacks pages of the live generation {live}") and "`larder restore`" in problem


@pytest.mark.parametrize("reason", sorted(PROBLEM_BY_STALE_REASON))
def test_a_replica_that_lags_behind_is_a_problem(config: NightConfig, reason: str) -> None:
    live = publish_night(config, DATA_UNTIL)
    with open_releases(config) as releases:
        beat = {
            "replica": "deaf",
            "serving": live,
            "holds": [live],
            "ready": [live],
            "stale": f"events_behind,{reason}",
        }
        releases.control.client.zadd(config.keyspace().replicas, {orjson.dumps(beat): releases.control.time()})
        status_report = make_report(config)

    (problem,) = status_report["problems"]
    assert problem.startswith("replica deaf ") and f"({reason})" in problem


def test_without_redis_it_tells_what_the_store_knows_and_says_so(
    config: NightConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    live = publish_night(config, DATA_UNTIL)
    with served(config, live):
        assert run(config) == 0 and "all is well" in capsys.readouterr().out
        assert run(config, "--json") == 0 and orjson.loads(capsys.readouterr().out)["live"] == live
    with redis.Redis.from_url(str(config.redis_url)) as client:
        client.shutdown(nosave=True)

    assert run(config) == 3
    text = capsys.readouterr().out
    assert live in text and "not well: Redis does not answer" in text and "due:" in text
    assert run(config, "--json") == 3
    status_report = orjson.loads(capsys.readouterr().out)
    assert status_report["live"] == live and status_report["redis"]["state"] == "away"
    assert find_generation(status_report, live)["redis_bytes"] > 0


def test_without_redis_replicas_are_not_said_to_be_none(
    config: NightConfig, own_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """They beat in Redis: with it away, two may be answering all the same."""
    publish_night(config, DATA_UNTIL)
    with redis.Redis.from_url(own_redis.url) as client:
        client.shutdown(nosave=True)

    assert run(config) == 3

    text = capsys.readouterr().out
    assert "0 replicas" not in text
    assert "replicas not counted, since their heartbeats are in Redis" in text


def test_events_are_reported_up_to_where_nights_and_the_live_one_have_them(config: NightConfig) -> None:
    config = replace(config, events=EventsConfig(enabled=True))
    publish_night(config, DATA_UNTIL)
    assert make_report(config)["events"] == {"taken_until": "0-0", "live_until": "0-0"}
    with connect(config.redis_url, 5.0) as client:
        body = Event("1", 1, b"u", b"i").to_bytes()
        client.xadd(config.keyspace().events, {"e": body}, id="1769860800391-4")
    take_events.run(config)

    status_report = make_report(config)

    assert status_report["events"] == {"taken_until": "1769860800391-4", "live_until": "0-0"}
    (line,) = [
        output_line for output_line in map(str, render_status(status_report)[1:]) if output_line.startswith("events:")
    ]
    assert line == (
        "events: the live generation has them up to none; nights took them over up to "
        "2026-01-31T12:00:00Z (1769860800391-4)"
    )
    assert make_report(replace(config, events=EventsConfig()))["events"] is None


def test_before_the_first_night_it_says_what_to_run(config: NightConfig) -> None:
    status_report = make_report(config)

    (problem,) = status_report["problems"]
    assert problem.startswith(f"nothing is live: the artefact store {config.store().url} has no record of a publish")
    assert "run `larder night`" in problem
    assert status_report["generations"] == [] and status_report["schedule"]["missing"]


def test_replicas_that_serve_while_neither_store_nor_redis_knows_of_it_do_not_call_for_a_night(
    config: NightConfig,
) -> None:
    shutil.rmtree(config.path(config.artifacts))
    with served(config, "20260101T000000Z-000000000001"):
        problems = make_report(config)["problems"]

    (problem,) = [problem for problem in problems if "artefact store" in problem or "folder" in problem]
    assert f"the folder {config.store().url} does not exist" in problem and "is it mounted?" in problem
    assert "larder night" not in problem


def test_where_no_redis_is_configured_none_is_started_and_no_replica_is_not_well(config: NightConfig) -> None:
    live = publish_night(config, DATA_UNTIL)
    status_report = make_report(replace(config, redis_url=None))

    assert (status_report["redis"]["state"], status_report["live"]) == ("absent", live)
    (problem,) = status_report["problems"]
    assert problem.startswith(f"no replica serves {live}: no Redis is configured and none runs here")


def test_against_another_store_it_says_what_store_and_redis_know_and_nothing_else(
    config: NightConfig, tmp_path: Path
) -> None:
    live = publish_night(config, DATA_UNTIL)
    astray = replace(config, artifacts=str(tmp_path / "elsewhere"))
    with served(config, live):
        status_report = make_report(astray)

    (problem,) = status_report["problems"]
    assert problem.startswith("Redis holds a pointer of epoch ") and f" ({live}) that no release record" in problem
    assert f"the folder {astray.store().url} does not exist: is it mounted?" in problem
    assert status_report["schedule"]["missing"] is None
    lines = " ".join(map(str, render_status(status_report)[1:]))
    assert "is missing" not in lines and "is not known" in lines


def test_a_redis_of_our_own_that_was_killed_is_told_and_not_restored_for_nobody(config: NightConfig) -> None:
    publish_night(config, DATA_UNTIL)
    alone = replace(config, redis_url=None)
    with join_or_start_server(alone.path(alone.state)) as running:
        os.kill(running.pid, signal.SIGKILL)
        assert poll_until(lambda: running_server(alone.path(alone.state)) is None)
        (problem,) = make_report(alone)["problems"]
        assert "the Redis that Larder ran here" in problem and "has ended" in problem

        arguments = SimpleNamespace(redis="running")
        with pytest.raises(ConfigError, match="has ended"), open_redis_for_command(alone, cast(Any, arguments), quiet):
            pass
    (alone.path(alone.state) / "redis.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="none runs here"), open_redis_for_command(alone, cast(Any, arguments), quiet):
        pass


def test_a_live_generation_that_no_replica_serves_is_reported(
    config: NightConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    live = publish_night(config, DATA_UNTIL)
    assert run(config) == 3
    output = " ".join(capsys.readouterr().out.split())
    assert f"not well: no replica serves {live}: run `larder serve`" in output
    assert "all is well" not in output
    with open_releases(config) as releases:
        beat = {"replica": "gone", "serving": live, "holds": [live]}
        an_hour_ago = releases.control.time() - 3_600
        releases.control.client.zadd(config.keyspace().replicas, {orjson.dumps(beat): an_hour_ago})

    assert run(config) == 3
    assert "no replica answers, but 1 did within the last day" in capsys.readouterr().out


def test_outside_of_a_project_the_missing_settings_are_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Run larder night` would make a namespace of nothing in whatever folder somebody stands in."""
    monkeypatch.chdir(tmp_path)
    for name in ("LARDER_CONFIG", "LARDER_ARTIFACTS", "LARDER_NAMESPACE", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)

    assert shell.main(["status", "--json"]) == 3

    (problem,) = orjson.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("there is no larder.toml in this folder") and "--config" in problem

    monkeypatch.setenv("LARDER_ARTIFACTS", str(tmp_path / "store"))
    assert shell.main(["status", "--json"]) == 3
    (problem,) = orjson.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("nothing is live: the artefact store ") and "larder night" in problem


def test_a_night_that_failed_is_a_problem_until_a_night_is_done(
    config: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All was well after nights that failed: nothing but a generation that was begun remained of them."""
    live = publish_night(config, DATA_UNTIL)
    night = Night(config, "a", NEXT)
    index_run = index.run

    def fail(*_: Any, **__: Any) -> None:
        raise BundleError("the model gives no finite output")

    monkeypatch.setattr(index, "run", fail)
    with pytest.raises(BundleError):
        run_night(night)
    with served(config, live):
        (problem,) = make_report(config)["problems"]
    assert problem.startswith("the last night failed at 20") and " in the step index (2" in problem
    assert "bundle_error: the model gives no finite output" in problem
    assert run(config, "--json") == 3

    monkeypatch.setattr(index, "run", index_run)
    run_night(night)
    with served(config, read_state(config).live_generation or ""):
        assert make_report(config)["well"]


def test_a_night_without_its_files_is_a_problem(config: NightConfig) -> None:
    sources = replace(config.sources, interactions=("gone.parquet",))
    with pytest.raises(LarderError):
        run_night(Night(replace(config, sources=sources), "a", NEXT))

    (problem,) = [problem for problem in make_report(config)["problems"] if "in the step begin: " in problem]
    assert "the live generation stays" not in problem  # there is none
