"""Formats that replicas read, as their heartbeats tell them: what the night does about one that reads less."""

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from cache.control.control_keys import demand_readers, demand_readers_of_night
from cache.errors import Refused, UnknownFormat
from cache.format.redis_keys import Keyspace
from cache.formats import FORMATS, KEYS, MANIFEST, served_formats
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore
from precompute.releases import moves
from tests.integration.release_world import A, B, World

if TYPE_CHECKING:
    pass


@pytest.fixture
def world(tmp_path, redis_url, keyspace):
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path / "store")), client, keyspace)


def beat(world: World, name: str, key: str = "", **more: Any) -> None:
    payload = {"replica": name, "serving": None, "holds": [], **more}
    world.client.zadd(key or world.keys.replicas, {orjson.dumps(payload): world.clock()})


def test_a_heartbeat_without_formats_is_of_the_first_release(world: World) -> None:
    beat(world, "old")
    beat(world, "new", release="0.3.0", reads=served_formats() | {MANIFEST: (1, 2)})

    demand_readers_of_night(world.control)
    with pytest.raises(Refused, match=r"replica old \(Larder 0\.1\.0\) reads manifest format 1") as refusal:
        demand_readers(world.control, {MANIFEST: 2}, "g has")

    assert "upgrade the services first" in refusal.value.message


def test_a_replica_that_reads_only_newer_ones_is_named_with_its_release(world: World) -> None:
    beat(world, "new", release="0.3.0", reads={MANIFEST: (2, 3)})

    with pytest.raises(Refused, match=r"reads manifest format 2 to 3, .* run a night with Larder 0\.3\.0"):
        demand_readers(world.control, {MANIFEST: 1}, "g has")


def test_a_replica_under_older_keys_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(world, "old", world.keys.replicas_of(1))
    monkeypatch.setattr(Keyspace, "replicas", property(lambda self: self.replicas_of(2)))
    monkeypatch.setitem(FORMATS, KEYS, FORMATS[KEYS]._replace(written_version=2, newest_readable_version=2))

    with pytest.raises(Refused, match="reads Redis keys format 1"):
        demand_readers_of_night(world.control)


def test_a_replica_whose_heartbeat_is_of_a_later_format_counts_and_is_named(world: World) -> None:
    beat(world, "later", format=2)

    with pytest.raises(UnknownFormat, match="replica later has heartbeat format 2"):
        world.control.replicas()


@pytest.mark.parametrize("move", ["publish", "canary", "roll_back"])
def test_nothing_moves_to_what_a_replica_does_not_read(world: World, move: str) -> None:
    world.publish(A, B) if move == "roll_back" else world.publish(A)
    if move != "roll_back":
        world.load(B)
    beat(world, "later", reads=served_formats() | {MANIFEST: (2, 2)})
    pointer_before, records = world.live(), len(world.releases.history())

    move_by_name = {
        "publish": lambda: moves.publish(world.releases, B, attempt="x"),
        "canary": lambda: moves.start_canary(world.releases, B, 50, "x"),
        "roll_back": lambda: moves.roll_back(world.releases, target_generation=A, reason="a test", attempt="x"),
    }
    with pytest.raises(Refused, match=r"reads manifest format 2, .* has 1: run a night with"):
        move_by_name[move]()

    assert world.live() == pointer_before and len(world.releases.history()) == records
