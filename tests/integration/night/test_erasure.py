"""Erasing an entity, end to end: served, blocked within seconds, gone from the next night, then reported done."""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.table import Table

from cache.control.control_keys import Control
from cache.control.states import GenerationState
from cache.errors import Conflict
from cache.format.directory import Directory
from cache.format.ids import hash_id
from cache.format.redis_keys import hash_hex
from cache.l2.sync_clients import connect
from cache.store.artefacts import read_manifest
from cache.store.blocklist import change_blocklist, latest_blocklist
from cache.store.erasures import all_erasures, request_erasure
from cache.traffic.experiments import exposure_part_path
from cache.usage.hot_keys import COLD_WINDOW, HOT_WINDOW, Window, window_number_of
from precompute.builds.build import record_copies
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig
from precompute.erasure.command import erase
from precompute.erasure.erasing import ErasureStatus, begin_erasing, drop_overlays, readmit_entity, settle_erasures
from precompute.partitions import catalogue
from precompute.releases import moves
from precompute.releases.recovery import restore
from precompute.releases.release_log import open_releases
from precompute.sources.erasures import demand_unerased
from precompute.steps import begin, embed_items, retire
from tests.integration import shell as in_process
from tests.integration.nights import DATA_UNTIL, NEXT, environment, histories, prepare, publish_night, top_lists
from tests.integration.serving_app import eventually, serving

LATER = "2026-01-31T00:00:00Z"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    """One small night, made once; each test works on a copy of its files."""
    config = prepare(tmp_path_factory.mktemp("erasure"), redis_url, users=80, items=60)
    publish_night(config, DATA_UNTIL)
    return config


@pytest.fixture
def night(published: NightConfig, tmp_path: Path) -> NightConfig:
    """The same night in a namespace of its own, restored from its files."""
    folder = tmp_path / "night"
    shutil.copytree(published.base, folder)
    config = dataclasses.replace(published, base=str(folder), superseded_grace_s=0.0, keep=1, warm_timeout_s=0.1)
    name = f"erasure-{tmp_path.name}"
    (folder / "artifacts" / config.namespace).rename(folder / "artifacts" / name)
    config = dataclasses.replace(config, namespace=name)
    restore(config)
    return config


def has(config: NightConfig, generation: str, entity: str, kind: str = "user") -> bool:
    """Whether the generation's directory knows the entity."""
    store = config.store()
    entities = read_manifest(store, generation).entity_sets[kind]
    directory = Directory.open(store.local(f"generations/{generation}"), entities)
    return directory.find_position(hash_id(entity.encode(), directory.seed)) >= 0


def live(config: NightConfig) -> str:
    with open_releases(config) as releases:
        pointer = releases.control.read_pointer()
    assert pointer is not None
    return pointer.generation


def settled(config: NightConfig) -> list[ErasureStatus]:
    with open_releases(config) as releases:
        return settle_erasures(config, releases)


def shell(config: NightConfig, *arguments: str, **more: str) -> "CompletedProcess[str]":
    environ = {"PATH": "/usr/bin:/bin", **environment(config), **more}
    return in_process.shell("--quiet", *arguments, environ=environ)


async def test_an_erased_user_is_blocked_leaves_with_the_next_night_and_is_done_when_swept(night: NightConfig) -> None:
    first = live(night)
    user = next(user_id for user_id in sorted(histories(night)) if has(night, first, user_id))
    async with serving(night) as app:
        path = f"/v1/lookup/user_topk/{user}"
        assert (await app.get(path))["source"] == "l2"

        erased = shell(night, "erase", user)

        assert erased.returncode == 0, erased.stderr
        assert first in erased.stdout and "1 pending" in erased.stdout

        async def is_blocked() -> bool:
            return bool((await app.get(path)).get("reason") == "entity_blocked")

        assert await eventually(is_blocked, 3.0)

        second = publish_night(night, NEXT)

        assert second != first and not has(night, second, user)
        assert user not in (night.store().local(f"generations/{second}") / "defaults.json").read_text()
        (standing,) = settled(night)
        assert [holder.generation for holder, _ in standing.holders_and_removals] == [first]
        assert standing.state == "pending" and "superseded" in standing.holders_and_removals[0][1]
        assert await eventually(is_blocked, 3.0)

    third = publish_night(night, LATER)
    retire.run(night)  # the replica that held the first one is gone

    assert night.store().names("generations") == [second, third]
    (erasure,) = all_erasures(night.store())
    assert not erasure.is_pending
    (standing,) = settled(night)
    assert standing.state == "done" and not standing.holders_and_removals
    listing = shell(night, "erase", "--list")
    assert user in listing.stdout and "done 20" in listing.stdout


def test_an_erased_item_leaves_the_catalogue_and_every_history(night: NightConfig) -> None:
    first = live(night)
    users = sorted(histories(night))
    item = next(iter(top_lists(night, first, users[:1]).values()))[0]
    begin_erasing(night.store(), item.encode(), "item", requested_at=1.0)

    second = publish_night(night, NEXT)

    assert not has(night, second, item, "item")
    lists = top_lists(night, second, users)
    assert lists and all(item not in item_list for item_list in lists.values())
    begin_report = json.loads((night.store().local(f"generations/{second}") / "work/begin.json").read_text())
    assert begin_report["erased"] == [1] and begin_report["unknown_items"] == 0


def test_entities_that_had_to_go_are_not_missed_by_the_gates(night: NightConfig) -> None:
    users = sorted(histories(night))
    for user in users[: len(users) // 2]:
        request_erasure(night.store(), user.encode(), "user", requested_at=1.0)

    second = publish_night(night, NEXT)

    gates = {gate["rule"]: gate for gate in read_manifest(night.store(), second).gates}
    assert gates["coverage_of_live"]["passed"] and gates["coverage_of_live"]["value"] >= 0.99
    assert gates["coverage_of_source"]["value"] >= 0.99


def test_erasing_before_a_retry_names_another_generation(night: NightConfig) -> None:
    build = begin.run(night, data_until=NEXT, run_after=None)
    begin_erasing(night.store(), b"u1", "user", requested_at=1.0)

    second_build = begin.run(night, data_until=NEXT, run_after=None)

    assert second_build["generation"] != build["generation"]
    assert begin.run(night, data_until=NEXT, run_after=None) == second_build


def test_an_erasure_while_a_night_begins_is_in_it_or_waits_for_it(
    night: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, store = min(histories(night)), night.store()
    write = catalogue.write_catalogue

    def erase_late(*arguments: Any, **more: Any) -> catalogue.CatalogueFields:
        begin_erasing(store, user.encode(), "user", requested_at=1.0)
        (standing_before,) = settled(night)
        assert (
            standing_before.state == "pending" and len(standing_before.holders_and_removals) == 2
        )  # live, and the one being made
        return write(*arguments, **more)

    monkeypatch.setattr(catalogue, "write_catalogue", erase_late)
    generation = publish_night(night, NEXT)

    assert has(night, generation, user)
    (standing,) = settled(night)
    assert generation in [holder.generation for holder, _ in standing.holders_and_removals]
    assert user.encode() in latest_blocklist(store).users


def test_an_erasure_between_naming_and_noting_gives_the_night_another_name(
    night: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, store, read_erasures = min(histories(night)), night.store(), all_erasures

    def slip_in(where: Any) -> Any:
        erasures = read_erasures(where)
        if not erasures:
            request_erasure(store, user.encode(), "user", requested_at=1.0)
        return erasures

    monkeypatch.setattr(begin, "all_erasures", slip_in)
    build = begin.run(night, data_until=NEXT, run_after=None)

    report = json.loads((store.local(f"generations/{build['generation']}") / "work/begin.json").read_text())
    assert report["erased"] == [1]


def test_overlays_of_the_entity_are_dropped_and_others_stay(night: NightConfig) -> None:
    keys, generation = night.keyspace(), live(night)
    with connect(night.redis_url, 5.0) as client:
        names = [
            keys.overlay(generation, table, hash_hex(hash_id(entity, 0)))
            for table in ("user_topk", "user_vector")
            for entity in (b"somebody", b"else")
        ]
        for name in names:
            client.set(name, b"x", px=60_000)
        erasure, is_new = begin_erasing(night.store(), b"somebody", "user", requested_at=1.0)

        dropped_count = drop_overlays(night, night.store(), Control(client, keys), [erasure])

        assert is_new and dropped_count == 2
        assert [bool(client.exists(name)) for name in names] == [False, True, False, True]


@pytest.mark.parametrize("window", [HOT_WINDOW, COLD_WINDOW])
def test_the_entity_leaves_the_sketches_of_requests(night: NightConfig, window: Window) -> None:
    keys = night.keyspace()
    key = keys.hot_names if window is HOT_WINDOW else keys.cold_names
    with connect(night.redis_url, 5.0) as client:
        control = Control(client, keys)
        current_hour = window_number_of(control.time(), window)
        for hour in (current_hour, current_hour - 1):
            for name in (b"user_topk:somebody", b"user_vector:somebody", b"user_topk:else"):
                client.zincrby(key(hour), 3.0, name)
        begin_erasing(night.store(), b"somebody", "user", requested_at=1.0)

        settled(night)

        remaining_names = [client.zrange(key(hour), 0, -1) for hour in (current_hour, current_hour - 1)]
        assert remaining_names == [[b"user_topk:else"]] * 2


def test_an_erased_user_leaves_the_exposures_of_experiments_and_an_item_does_not(night: NightConfig) -> None:
    # Given requests of an experiment that were made with three keys
    store, path = night.store(), exposure_part_path(1, "replica", 1)
    exposures = [["gone", 1.0], ["an item", 2.0], ["other", 3.0]]
    arm = {"experiment": "e", "arm": "a", "requests": 3, "feedback": {}, "exposures": exposures}
    store.write(path, orjson.dumps({"arms": [arm]}))

    # When a user and an item are erased
    begin_erasing(store, b"gone", "user", requested_at=1.0)
    begin_erasing(store, b"an item", "item", requested_at=1.0)
    settled(night)

    # Then only the user's key is gone
    raw = store.read(path)
    assert raw is not None
    assert orjson.loads(raw)["arms"][0]["exposures"] == exposures[1:]


def test_an_entity_that_nothing_holds_is_done_at_once_and_stays_out(night: NightConfig) -> None:
    begin_erasing(night.store(), b"nobody", "user", requested_at=1.0)

    (standing,) = settled(night)

    assert standing.state == "done"
    assert settled(night) == [standing]


def test_a_mistyped_id_does_not_read_like_an_erasure_that_was_carried_out(night: NightConfig) -> None:
    item = str(pq.read_table(night.base + "/items.parquet").column(0)[0])

    typo = shell(night, "erase", "u-00 17", "--as", "user").stdout
    wrong_kind_output = shell(night, "erase", item, "--as", "user").stdout
    right = shell(night, "erase", item, "--as", "item").stdout

    assert "no generation holds user 'u-00 17': check the id" in " ".join(typo.split())
    assert typo.count("'u-00 17'") >= 2 and "did you mean" not in typo
    assert "did you mean --as item?" in " ".join(wrong_kind_output.split())
    assert "check the id" not in right


def test_a_user_without_a_record_is_still_found_in_the_partition(night: NightConfig) -> None:
    clicks = pq.read_table(night.path("interactions.parquet"))
    more = pa.table({
        "user": ["lurker"], "item": ["never-heard-of"],
        "timestamp": pa.array([clicks["timestamp"][0].as_py()], clicks.schema.field("timestamp").type),
    })  # fmt: skip
    pq.write_table(pa.concat_tables([clicks, more]), night.path("interactions.parquet"))
    generation = publish_night(night, NEXT)
    assert not has(night, generation, "lurker")

    begin_erasing(night.store(), b"lurker", "user", requested_at=1.0)

    (standing,) = settled(night)
    assert [holder.generation for holder, _ in standing.holders_and_removals] == [generation]


def test_unblocking_resurrects_no_entity_and_forgetting_needs_a_reason(night: NightConfig) -> None:
    store = night.store()
    begin_erasing(store, b"u1", "user", requested_at=1.0)
    begin_erasing(store, b"i1", "item", requested_at=1.0)

    with pytest.raises(Conflict, match="--forget --reason"):
        demand_unerased(store, [b"i1"])
    change_blocklist(store, unblock_items=[b"i1"], unblock_entities=[b"u1"], unblock_users=[b"u1"])
    settled(night)
    blocked = latest_blocklist(store)
    assert (blocked.items, blocked.users) == (frozenset({b"i1"}), frozenset({b"u1"}))

    refused = shell(night, "erase", "u1", "--forget")
    assert refused.returncode == 1 and "--reason" in refused.stderr
    readmit_entity(store, b"u1", "user", forgotten_at=2.0, reason="consented again")
    with pytest.raises(Conflict, match="not erased"):
        readmit_entity(store, b"u1", "user", forgotten_at=3.0, reason="twice")

    assert latest_blocklist(store).users == frozenset()
    assert [erasure.is_in_force for erasure in all_erasures(store)] == [False, True]
    later_erasure, is_new = begin_erasing(store, b"u1", "user", requested_at=4.0)
    assert is_new and later_erasure.number == 3


def test_erasing_twice_is_one_request_and_an_item_of_the_same_id_is_left_alone(night: NightConfig) -> None:
    store = night.store()
    first, _ = begin_erasing(store, b"42", "user", requested_at=1.0)
    repeated_erasure, is_new = begin_erasing(store, b"42", "user", requested_at=2.0)

    assert (repeated_erasure, is_new) == (first, False)
    blocked = latest_blocklist(store)
    assert blocked.users == frozenset({b"42"})
    assert not blocked.items and not blocked.entities


def test_without_redis_the_entity_is_blocked_all_the_same(night: NightConfig) -> None:
    user = min(histories(night))

    erased = shell(night, "erase", user, REDIS_URL="redis://127.0.0.1:1")

    assert erased.returncode == 0, erased.stderr
    assert "overlays expire within" in erased.stderr and "1 pending" in erased.stdout
    assert user.encode() in latest_blocklist(night.store()).users


def test_a_refused_generation_that_holds_the_entity_keeps_it_pending(night: NightConfig) -> None:
    build = begin.run(night, data_until=NEXT, run_after=None)
    with open_releases(night) as releases:
        moves.refuse(releases, build["generation"], reason="a test says so", attempt="test")
        assert releases.state(build["generation"]) is GenerationState.REFUSED
    begin_erasing(night.store(), min(histories(night)).encode(), "user", requested_at=1.0)

    (standing,) = settled(night)

    fates = {holder.generation: fate for holder, fate in standing.holders_and_removals}
    assert fates[build["generation"]].startswith("refused, swept by the next retire")


def test_an_erasure_is_done_only_when_no_other_host_has_a_copy(
    night: NightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers that share a store and Redis: one computed what the other retired."""
    worker, other_host = (
        dataclasses.replace(
            night, artifacts=f"memory://{tmp_path.name}", namespace=f"hosts-{tmp_path.name}", state=str(tmp_path / name)
        )
        for name in ("worker", "other")
    )
    build = begin.run(worker, data_until=DATA_UNTIL, run_after=None)
    begin_erasing(worker.store(), min(histories(night)).encode(), "user", requested_at=1.0)
    with open_releases(other_host) as releases:
        moves.refuse(releases, build["generation"], reason="a test says so", attempt="test")

    assert retire.run(other_host)["retired"] == [build["generation"]]

    (standing,) = settled(other_host)
    copies = worker.store().copies
    assert copies is not None and standing.state == "pending"
    assert [(holder.generation, holder.host) for holder, _ in standing.holders_and_removals] == [
        (build["generation"], copies.host_id)
    ]
    assert "swept by the next step or service on that host" in standing.holders_and_removals[0][1]

    second_build = begin.run(worker, data_until=NEXT, run_after=None)
    assert settled(other_host) == [standing]
    monkeypatch.setattr("precompute.builds.build.COPY_IDLE_S", -60.0)
    embed_items.run(worker, second_build)
    (standing,) = settled(other_host)

    assert copies.generations() == [second_build["generation"]]
    assert standing.state == "done"


def test_without_redis_copies_on_hosts_are_named_and_can_be_declared_gone(night: NightConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(
        night, artifacts=f"memory://{tmp_path.name}", state=str(tmp_path / "a"), redis_url=None
    )
    store, generation = config.store(), f"20260101T000000Z-{'0' * 12}"
    record_copies(store, generation)
    arguments = {"entity": "somebody", "kind": "user", "list": False, "status": False, "forget": False}
    arguments |= {"reason": None, "gone": None, "json": False}

    table, *lines = erase(config, argparse.Namespace(**arguments), quiet)

    assert store.copies is not None and isinstance(table, Table)
    assert list(table.columns[4].cells) == [f"{generation} on {store.copies.host_id}"]
    assert "1 pending" in str(lines[0]) and "erase --gone HOST" in str(lines[1])

    elsewhere = dataclasses.replace(config, state=str(tmp_path / "b"))
    table, *lines = erase(elsewhere, argparse.Namespace(**arguments | {"gone": "*"}), quiet)

    assert isinstance(table, Table) and list(table.columns[4].cells) == [""]
