"""Pages in pieces, read back and mended, and the watch over readers, on a real Redis."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cache.config.night import GovernorConfig
from cache.control.control_keys import Control
from cache.errors import Conflict, CorruptArtefact
from cache.format.manifest import Manifest
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.releases import Pointer
from precompute.bulk.governor import Governor, IdlePriority, open_governor
from precompute.bulk.load import Part, load_part, page_keys, parts_of, unlink_pages
from precompute.bulk.readback import UNANSWERED_PIECES_MAX, PageDigest, PieceReader, read_page_lengths, verify_part
from precompute.bulk.reload import load_missing, repair_pages
from precompute.bulk.watch import FOREIGN_READS_PER_S_MIN, Watcher
from tests.integration.release_world import A, World
from tests.polling import poll_until

ALWAYS = GovernorConfig(readers="always", floor_mib_s=512.0, idle_s=0.05)


class Small(Governor):
    """Pieces of 100 bytes, for pages of 320; counts them."""

    pieces = 0

    def pace(self, size_bytes: int) -> None:
        self.pieces += 1
        super().pace(size_bytes)

    @property
    def piece_bytes(self) -> int:
        return 100


@pytest.fixture
def world(tmp_path: Path, redis_url: str, keyspace: Keyspace) -> Iterator[World]:
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


@pytest.fixture
def small(world: World) -> Iterator[Small]:
    governor = Small(ALWAYS, Watcher(world.control, probe_interval_ms=2.0))
    yield governor
    governor.close()


def loaded(world: World, governor: Governor | None) -> tuple[Manifest, Path]:
    manifest = world.make(A, 57)
    root = world.store.local(generation_path(A))
    for part in parts_of(manifest):
        assert load_part(world.client, world.keys, manifest, root, part, governor=governor)
    return manifest, root


def values(world: World, manifest: Manifest) -> list[object]:
    return [world.client.get(name) for name in page_keys(world.keys, manifest)]


def calls(world: World, name: str) -> int:
    command_stats = world.client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})
    return int(command_stats["calls"])


def test_pages_in_pieces_are_byte_for_byte_the_pages_sent_whole(world, small):
    manifest, _ = loaded(world, None)
    page_values = values(world, manifest)
    world.client.delete(*page_keys(world.keys, manifest), world.keys.loaded_parts(A))
    set_calls_before, paced = calls(world, "set"), small.pieces

    _, root = loaded(world, small)

    assert values(world, manifest) == page_values
    assert calls(world, "set") - set_calls_before == 2 * 6
    assert small.pieces - paced == 2 * (5 * 4 + 3)
    for part in parts_of(manifest):
        assert verify_part(world.client, world.keys, manifest, root, part, governor=small) == 6
        assert dict(read_page_lengths(world.client, world.keys, manifest, part)) == {
            page: part.page_size_bytes(page) for page in range(6)
        }


def test_a_load_that_ends_within_a_page_leaves_what_was_there_and_the_connection_unused(world, small):
    manifest, root = loaded(world, None)
    page_values, part = values(world, manifest), parts_of(manifest)[0]
    world.client.delete(world.keys.loaded_parts(A), part.page_key(world.keys, A, 5))

    def pace(_size: int) -> None:
        small.pieces += 1
        if small.pieces == 2 * 4 + 2:  # within the third page
            raise KeyboardInterrupt

    small.pace = pace
    with pytest.raises(KeyboardInterrupt):
        load_part(world.client, world.keys, manifest, root, part, governor=small)

    del small.pace
    assert values(world, manifest) == [*page_values[:5], None, *page_values[6:]]
    assert load_part(world.client, world.keys, manifest, root, part, governor=small)
    assert values(world, manifest) == page_values


def test_pieces_are_asked_for_ahead_of_their_replies(world, small, monkeypatch):
    """A round trip per piece of 16 KiB at 2 ms would be 8 MB/s, half of the governor's floor."""
    manifest, root = loaded(world, small)
    ahead, receive_piece = [], PieceReader._receive_piece

    def note_and_receive(reader: PieceReader) -> Iterator[PageDigest]:
        ahead.append(len(reader._unanswered_requests))
        return receive_piece(reader)

    monkeypatch.setattr(PieceReader, "_receive_piece", note_and_receive)
    part = parts_of(manifest)[0]

    assert verify_part(world.client, world.keys, manifest, root, part, governor=small) == 6

    pieces = 5 * 4 + 3
    assert len(ahead) == pieces
    assert ahead[: pieces - UNANSWERED_PIECES_MAX] == [UNANSWERED_PIECES_MAX + 1] * (pieces - UNANSWERED_PIECES_MAX)


def test_reading_that_ends_within_a_page_leaves_no_reply_to_the_next_command(world, small):
    manifest, root = loaded(world, None)
    part, page_values = parts_of(manifest)[0], values(world, manifest)

    def pace(_size: int) -> None:
        small.pieces += 1
        if small.pieces == 2 * 4 + 2:  # within the third page
            raise KeyboardInterrupt

    small.pace = pace
    with pytest.raises(KeyboardInterrupt):
        verify_part(world.client, world.keys, manifest, root, part, governor=small)

    del small.pace
    assert values(world, manifest) == page_values
    assert verify_part(world.client, world.keys, manifest, root, part, governor=small) == 6


def test_readers_that_go_while_pages_are_read_back_change_nothing(world, small, monkeypatch):
    manifest, root = loaded(world, None)
    piece_sizes = iter([100] * 6)
    monkeypatch.setattr(Small, "piece_bytes", property(lambda _: next(piece_sizes, None)))

    for part in parts_of(manifest):
        assert verify_part(world.client, world.keys, manifest, root, part, governor=small) == 6


@pytest.mark.parametrize("damage", ["bytes", "missing", "shorter", "longer"])
def test_a_damaged_page_is_found_in_pieces_and_mended_where_it_lies(world, small, damage):
    manifest, root = loaded(world, small)
    sound = values(world, manifest)
    part = parts_of(manifest)[1]
    name = part.page_key(world.keys, A, 2)
    match damage:
        case "bytes":
            world.client.setrange(name, 110, b"?")
        case "missing":
            world.client.delete(name)
        case "shorter":
            world.client.set(name, b"x" * 50)
        case _:
            world.client.append(name, b"x")
    deleted = calls(world, "del") + calls(world, "unlink")
    with pytest.raises(CorruptArtefact, match="load again"):
        verify_part(world.client, world.keys, manifest, root, part, governor=small)

    assert repair_pages(world.control, world.store, A, governor=small) == [name]

    assert values(world, manifest) == sound
    assert calls(world, "del") + calls(world, "unlink") == deleted
    assert repair_pages(world.control, world.store, A) == []
    assert load_missing(world.control, world.store, A) == 0


def test_a_page_that_is_only_shorter_is_noticed_without_reading_it(world):
    manifest, _ = loaded(world, None)
    part = parts_of(manifest)[0]
    world.client.set(part.page_key(world.keys, A, 3), b"short")
    reads_before = calls(world, "getrange") + calls(world, "get")

    assert load_missing(world.control, world.store, A) == 1

    # Only the part that was written again is read back.
    assert calls(world, "getrange") + calls(world, "get") - reads_before <= 6 + 3


def test_retiring_among_readers_unlinks_a_page_at_a_time(world, small):
    manifest, _ = loaded(world, small)
    unlinks_before = calls(world, "unlink")

    assert unlink_pages(world.client, world.keys, manifest, governor=small) == 13

    assert calls(world, "unlink") - unlinks_before == 13 and world.pages() == set()


def test_the_watch_sees_replicas_other_readers_and_round_trips(own_redis, keyspace):
    with connect(own_redis.url, 5.0) as client:
        control = Control(client, keyspace)
        client.set(keyspace.live, Pointer(A, 1, None, "test", 0.0).to_bytes())
        watch = Watcher(control, probe_interval_ms=1.0)
        try:
            assert poll_until(
                lambda: (look := watch.get_latest_observation()) is not None and look.foreign_reads_per_s is not None
            )
            observation = watch.get_latest_observation()
            assert observation is not None and observation.replica_count == 0
            assert (observation.foreign_reads_per_s or 0.0) <= FOREIGN_READS_PER_S_MIN
            round_trips_s: list[float] = []

            def has_many() -> bool:
                round_trips_s.extend(watch.take_round_trips_s())
                return len(round_trips_s) > 50

            assert poll_until(has_many)
            assert all(0 < round_trip_s < 5 for round_trip_s in round_trips_s)

            beat = b'{"replica":"r1","serving":null,"holds":[],"l2_p99_ms":0.4}'

            def beating() -> bool:
                client.zadd(keyspace.replicas, {beat: control.time()})
                observation = watch.get_latest_observation()
                return observation is not None and observation.p99_ms_by_replica == {"r1": 0.4}

            assert poll_until(beating)

            def noticed() -> bool:
                for _ in range(50):
                    client.get("anything")
                observation = watch.get_latest_observation()
                return observation is not None and (observation.foreign_reads_per_s or 0.0) > FOREIGN_READS_PER_S_MIN

            assert poll_until(noticed)
            pings_before = client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"]
            for _ in range(10):
                watch.stir()
            assert client.info("commandstats")["cmdstat_ping"]["calls"] == pings_before + 10
        finally:
            watch.close()
        watch.stir()  # harmless
        # Redis closes a connection some time after its reader has gone.
        assert poll_until(lambda: len(client.client_list()) == 1)


def test_a_watch_that_cannot_connect_says_so_by_round_trips_that_never_end(world):
    unreachable = redis.Redis(port=1, socket_timeout=0.2)
    watch = Watcher(Control(unreachable, world.keys), probe_interval_ms=1.0)
    governor = Governor(GovernorConfig(floor_mib_s=1024.0, idle_s=0.05), watch)
    try:
        manifest, _ = loaded(world, governor)

        assert None not in values(world, manifest)
        assert watch.get_latest_observation() is None
        round_trips_s: list[float] = []

        def has_no_answer() -> bool:
            round_trips_s.extend(watch.take_round_trips_s())
            return math.inf in round_trips_s

        assert poll_until(has_no_answer)
    finally:
        governor.close()


def test_an_idle_redis_is_loaded_without_waiting(own_redis, keyspace):
    with connect(own_redis.url, 5.0) as client, open_governor(GovernorConfig(), Control(client, keyspace)) as governor:

        def flat_out() -> bool:
            governor.pace(1)
            return governor.piece_bytes is None

        assert poll_until(flat_out)
        slept_s = governor.slept_s
        for _ in range(1_000):
            governor.pace(1 << 20)
        assert governor.slept_s == slept_s


def test_giving_way_ends_where_it_began():
    idle_priority = IdlePriority()
    is_idle = idle_priority(True)

    assert idle_priority(True) == is_idle and idle_priority(False) is False and idle_priority(False) is False


@pytest.mark.parametrize("how", ["repaired", "streamed"])
def test_files_that_are_retired_while_they_are_read_are_a_conflict(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    manifest, root = loaded(world, None)
    part = parts_of(manifest)[0]
    if how == "streamed":
        world.client.delete(part.page_key(world.keys, A, 0))
    read_sums = Part.read_page_checksums

    def retired(self: Part, folder: Path) -> object:
        shutil.rmtree(root)
        return read_sums(self, folder)

    monkeypatch.setattr(Part, "read_page_checksums", retired)
    act = load_missing if how == "streamed" else repair_pages
    with pytest.raises(Conflict, match=r"\.sums of .* is missing from .* so its pages cannot be loaded") as caught:
        act(world.control, world.store, A)
    assert caught.value.details == {"generation": A}
