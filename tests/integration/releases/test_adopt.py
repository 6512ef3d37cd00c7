"""A Redis and an artefact store that do not belong together: told before any work, and a recorded way through."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import redis

from cache.control.control_keys import RegistryRow
from cache.control.states import GenerationState
from cache.control.store_problems import demand_own_store
from cache.errors import ConfigError, Conflict, CorruptArtefact, LarderError
from cache.store.audit import audit_records
from cache.store.blocklist import change_blocklist
from cache.store.releases import Pointer, all_releases
from infra.cli.check import check_store
from precompute.cli.status import read_state, report_status
from precompute.config.settings import NightConfig
from precompute.erasure.erasing import begin_erasing, settle_erasures
from precompute.releases.recovery import adopt, restore, roll_back
from precompute.releases.release_log import open_releases
from precompute.releases.sweep import sweep
from precompute.steps import begin
from tests.integration.nights import DATA_UNTIL, NEXT, build_verified, histories, prepare, publish, publish_night

FUTURE = 9_999_999_999_999


@pytest.fixture(scope="module")
def verified_nights(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[NightConfig, str, str]:
    """Two verified nights, one of them published."""
    config = prepare(tmp_path_factory.mktemp("adopt") / "n", redis_url, users=150, items=60)
    first = build_verified(config, DATA_UNTIL)
    publish(config, first)
    return config, first, build_verified(config, NEXT)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        yield connection


def live(config: NightConfig) -> Pointer:
    with open_releases(config) as releases:
        pointer = releases.control.read_pointer()
        releases.view().demand_agreement()
    assert pointer is not None
    return pointer


@pytest.mark.parametrize("stray", ["newer", "garbage", "not ours"])
def test_what_the_store_says_is_live_is_live_again_above_the_stray_epoch(
    verified_nights: tuple[NightConfig, str, str], client: redis.Redis, stray: str
) -> None:
    config, first, second = verified_nights
    key = config.keyspace().live
    raw = {
        "newer": Pointer(second, FUTURE, first, "lost", 0.0).to_bytes(),
        "garbage": b"garbage",
        "not ours": b'{"epoch": "x"}',
    }[stray]
    client.set(key, raw)
    with pytest.raises(LarderError, match="--adopt") as caught:
        begin.run(config, data_until="2026-02-01T00:00:00Z", run_after=None)
    assert key in caught.value.message
    if stray == "newer":
        assert isinstance(caught.value, Conflict) and config.store().url in caught.value.message
    with pytest.raises(ConfigError, match="reason"):
        adopt(config, reason=" ", attempt="a")

    adoption = adopt(config, reason="the store was put back", attempt=f"adopt-{stray}")

    pointer = live(config)
    assert adoption["generation"] == first == pointer.generation
    if stray == "newer":
        assert pointer.epoch > FUTURE
        adoption_records = [release for release in all_releases(config.store()) if "put back" in release.reason]
        assert adoption_records and adoption_records[0].expected == FUTURE
    audit_record = audit_records(config.store())[-1]
    assert (audit_record.action, audit_record.reason) == ("adopt", "the store was put back")
    assert key in audit_record.subject and audit_record.outcome == "done"
    assert audit_record.found == {"removed": adoption["removed"]}
    begin.run(config, data_until="2026-02-01T00:00:00Z", run_after=None)
    with pytest.raises(Conflict, match="without --adopt"):
        adopt(config, reason="again", attempt="b")


@pytest.mark.parametrize("stray", ["pointer", "garbage"])
def test_a_new_store_publishes_its_first_night_once_the_stray_pointer_is_removed(
    tmp_path: Path, redis_url: str, client: redis.Redis, stray: str
) -> None:
    config = prepare(tmp_path / "n", redis_url, users=150, items=60)
    lost_generation = publish_night(config, DATA_UNTIL)
    shutil.rmtree(config.path(config.artifacts))
    key = config.keyspace().live
    if stray == "garbage":
        client.set(key, b"garbage")
    with pytest.raises((Conflict, CorruptArtefact)):
        publish_night(config, DATA_UNTIL)

    adoption = adopt(config, reason="a new store", attempt="adopt", accepts_empty=True)

    assert adoption["generation"] is None and not client.exists(key)
    with open_releases(config) as releases:
        assert releases.control.rows()[lost_generation].state is GenerationState.ABANDONED
    # Publish the same night again.
    assert publish_night(config, DATA_UNTIL) == lost_generation == live(config).generation
    assert publish_night(config, NEXT) == live(config).generation


@pytest.mark.parametrize("remains", ["no folder", "an empty folder", "blocks alone"])
def test_a_store_without_a_release_record_is_not_adopted_and_nobody_advises_it(
    tmp_path: Path, redis_url: str, client: redis.Redis, remains: str
) -> None:
    # given a published night, whose store is not mounted
    config = prepare(tmp_path / "n", redis_url, users=150, items=60)
    publish_night(config, DATA_UNTIL)
    store = config.store()
    shutil.rmtree(config.path(config.artifacts))
    if remains != "no folder":
        Path(store.url).mkdir(parents=True)
    if remains == "blocks alone":
        change_blocklist(store, block_items=[b"i1"])
    told = {
        "no folder": f"the folder {store.url} does not exist",
        "an empty folder": f"the folder {store.url} is empty",
        "blocks alone": f"the artefact store {store.url} has no release record",
    }[remains]

    # when status, check, the night and a move look at it
    (problem,) = [
        text for text in report_status(config, read_state(config))["problems"] if "a pointer of epoch" in text
    ]
    state, check_text = check_store(config)
    raw_pointer = client.get(config.keyspace().live)
    with pytest.raises(Conflict) as refusal:
        adopt(config, reason="it looked lost", attempt="adopt")
    with pytest.raises(Conflict) as night_refusal:
        demand_own_store(config, config.redis_url, 5.0)
    with open_releases(config) as releases, pytest.raises(Conflict) as move_refusal:
        releases.demand_agreement()

    # then each describes the store, and none advises to adopt it
    for text in (problem, check_text, night_refusal.value.message, move_refusal.value.message):
        assert told in text and "is it mounted?" in text and "--adopt" not in text
    assert state == "to do"
    assert told in refusal.value.message and "forget" in refusal.value.message and "--empty" in refusal.value.message
    assert client.get(config.keyspace().live) == raw_pointer


def test_the_advice_to_adopt_is_a_whole_command(tmp_path: Path, redis_url: str, client: redis.Redis) -> None:
    config = prepare(tmp_path / "n", redis_url, users=150, items=60)
    generation = publish_night(config, DATA_UNTIL)
    client.set(config.keyspace().live, Pointer(generation, FUTURE, None, "lost", 0.0).to_bytes())

    problems = report_status(config, read_state(config))["problems"]

    assert any('`larder restore --adopt --reason "..."`' in problem for problem in problems)


def test_an_adoption_gives_a_retired_generation_of_the_copy_its_state_back(tmp_path: Path, redis_url: str) -> None:
    # given a backup with a live and a previous generation, and a later night after which the previous one was retired
    config = prepare(tmp_path / "n", redis_url, users=150, items=60)
    first, second = publish_night(config, DATA_UNTIL), publish_night(config, NEXT)
    store_folder = config.path(config.artifacts)
    shutil.copytree(store_folder, tmp_path / "backup")
    publish_night(config, "2026-02-03T00:00:00Z")
    with open_releases(config) as releases:
        releases.control.set_row(first, RegistryRow(GenerationState.RETIRED, 1.0))

    # when the backup is put back, and adopted
    shutil.rmtree(store_folder)
    shutil.copytree(tmp_path / "backup", store_folder)
    adoption = adopt(config, reason="the backup was put back", attempt="adopt")

    # then both are loaded, and a roll back has a target
    assert adoption["loaded"] == [second, first]
    assert live(config).previous == first
    assert roll_back(config, target_generation=None, reason="try", attempt="back")["generation"] == first


@pytest.mark.parametrize("is_served", [False, True])
def test_pages_of_a_night_that_the_copy_lacks_hold_an_erasure_up_until_they_are_removed(
    tmp_path: Path, redis_url: str, client: redis.Redis, is_served: bool
) -> None:
    # given a copy of the store that is put back after a later night, and adopted
    config = replace(prepare(tmp_path / "n", redis_url, users=150, items=60), superseded_grace_s=0.0)
    first = publish_night(config, DATA_UNTIL)
    store_folder = config.path(config.artifacts)
    shutil.copytree(store_folder, tmp_path / "copy")
    lost_generation = publish_night(config, NEXT)
    shutil.rmtree(store_folder)
    shutil.copytree(tmp_path / "copy", store_folder)
    assert adopt(config, reason="the copy was put back", attempt="adopt")["generation"] == first
    lost_pages = f"{config.keyspace().page(lost_generation, 'x', 0).removesuffix(':x:0')}:*"
    assert client.keys(lost_pages)

    # when a user is erased
    begin_erasing(config.store(), min(histories(config)).encode(), "user", requested_at=1.0)
    with open_releases(config) as releases:
        (status,) = settle_erasures(config, releases)
        held_generations = {holder.generation for holder, _fate in status.holders_and_removals}
        assert status.state == "pending" and held_generations == {first, lost_generation}

        # then the next sweep removes the pages, one by one where somebody reads
        if is_served:
            beat = orjson.dumps({"replica": "r", "serving": first, "holds": [first], "ready": [first]})
            client.zadd(config.keyspace().replicas, {beat: releases.control.time()})
        swept = sweep(config, releases, attempt="sweep")
        (status,) = settle_erasures(config, releases)

    assert swept.retired_generations == (lost_generation,) and swept.removed_key_count > 3
    assert client.keys(lost_pages) == []
    assert {holder.generation for holder, _fate in status.holders_and_removals} == {first}


def test_check_says_that_redis_has_lost_its_pointer(
    verified_nights: tuple[NightConfig, str, str], client: redis.Redis
) -> None:
    config = verified_nights[0]
    assert check_store(config)[0] == "ok"
    live_generation = live(config).generation
    client.delete(config.keyspace().live)

    state, check_text = check_store(config)
    restore(config, attempt="refill")

    assert state == "to do" and "lost its pointer" in check_text and "`larder restore`" in check_text
    assert live_generation in check_text
    assert check_store(config)[0] == "ok"


@pytest.mark.parametrize("kind", ["older", "newer format", "garbage"])
def test_check_says_that_redis_has_a_pointer_with_which_no_night_can_run(
    tmp_path: Path, redis_url: str, client: redis.Redis, kind: str
) -> None:
    config = prepare(tmp_path / "n", redis_url, users=150, items=60)
    first, _ = publish_night(config, DATA_UNTIL), publish_night(config, NEXT)
    key = config.keyspace().live
    raw_pointer = client.get(key)
    assert isinstance(raw_pointer, bytes) and check_store(config)[0] == "ok"
    pointer, earliest = live(config), all_releases(config.store())[0]
    assert earliest.epoch < pointer.epoch
    raw, told = {
        "older": (Pointer(first, earliest.epoch, None, "lost", 0.0).to_bytes(), "run `larder restore`"),
        "newer format": (orjson.dumps(orjson.loads(raw_pointer) | {"format": 2}), "format 2"),
        "garbage": (b"garbage", "--adopt"),
    }[kind]
    client.set(key, raw)
    try:
        state, check_text = check_store(config)
    finally:
        client.set(key, raw_pointer)

    assert state == "to do" and told in check_text
    assert check_store(config)[0] == "ok"


def test_there_is_nothing_to_adopt_where_there_is_no_pointer(tmp_path: Path, redis_url: str) -> None:
    config = replace(prepare(tmp_path / "n", redis_url, users=120, items=60), namespace="nothing")
    with pytest.raises(Conflict, match="nothing to adopt"):
        adopt(config, reason="x", attempt="a")
