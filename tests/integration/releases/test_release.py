"""Publish, roll back, refuse and pin against a real Redis and a real folder."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from cache.control.control_keys import Control, RegistryRow
from cache.control.states import GenerationState
from cache.errors import ConfigError, Conflict, CorruptArtefact, Refused
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.releases import Pointer, Release, all_releases, done_path, intent_path, manifest_digest, newest_release
from precompute.bulk.load import load_part, page_keys, parts_of
from precompute.bulk.readback import verify_part
from precompute.releases import moves
from tests.integration.release_world import A, B, C, World, pages_of


@pytest.fixture
def world(tmp_path, redis_url, keyspace) -> Iterator[World]:
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


def test_publishing_moves_the_pointer_and_writes_down_why_first(world):
    world.publish(A, B)

    assert (world.live().generation, world.live().previous) == (B, A)
    records = all_releases(world.store)
    assert [(record.action, record.generation, record.is_done) for record in records] == [
        ("publish", A, True),
        ("publish", B, True),
    ]
    assert world.live().epoch == records[-1].epoch
    assert world.control.rows()[A].state is GenerationState.SUPERSEDED
    newest_record = newest_release(world.store)
    assert newest_record is not None and newest_record.generation == B


def test_publishing_again_changes_nothing(world):
    world.publish(A)
    pointer_before = world.live()
    moved = moves.publish(world.releases, A, attempt=world.attempt())
    assert not moved.has_moved and world.live() == pointer_before


def test_older_data_is_never_published_over_newer(world):
    """Clears and backfills do not reorder generations."""
    world.load(A)
    world.publish(B)
    with pytest.raises(Conflict, match="older than"):
        moves.publish(world.releases, A, attempt=world.attempt())
    assert world.live().generation == B


@pytest.mark.parametrize(
    "state", [state for state in GenerationState if state not in (GenerationState.VERIFIED, GenerationState.LIVE)]
)
def test_only_a_verified_generation_is_published(world, state):
    world.publish(A)
    world.load(B)
    world.control.set_row(B, RegistryRow(state, 0.0))
    with pytest.raises(Conflict):
        moves.publish(world.releases, B, attempt=world.attempt())
    assert world.live().generation == A


def test_rolling_back_twice_never_meets_a_bad_generation(world):
    """Previous is the newest superseded one, never one rolled back."""
    world.publish(A, B, C)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    assert all_releases(world.store)[-1].reason == "bad"
    assert (world.live().generation, world.live().previous) == (B, A)
    moves.roll_back(world.releases, target_generation=None, reason="bad too", attempt=world.attempt())
    assert (world.live().generation, world.live().previous) == (A, None)
    with pytest.raises(Conflict, match="no earlier"):
        moves.roll_back(world.releases, target_generation=None, reason="", attempt=world.attempt())
    for rolled_back_generation in (B, C):
        with pytest.raises(Conflict, match="rolled_back"):
            moves.roll_back(
                world.releases, target_generation=rolled_back_generation, reason="", attempt=world.attempt()
            )
        with pytest.raises(Conflict, match="rolled_back"):
            moves.publish(world.releases, rolled_back_generation, attempt=world.attempt())


def test_a_rolled_back_generation_returns_after_a_new_verification_only(world):
    world.publish(A, B)
    moves.roll_back(world.releases, target_generation=A, reason="bad", attempt=world.attempt())
    world.releases.mark_verified(B, attempt=world.attempt())
    moves.publish(world.releases, B, attempt=world.attempt())
    assert (world.live().generation, world.live().previous) == (B, A)


def test_a_later_night_can_be_published_after_a_rollback(world):
    """A stale guard must not block the next push."""
    world.publish(A, B)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    world.publish(C)
    assert (world.live().generation, world.live().previous) == (C, A)


def test_a_refused_generation_cannot_be_published(world):
    world.publish(A)
    world.load(B)
    moves.refuse(world.releases, B, reason="coverage is 0.4, the threshold 0.95", attempt=world.attempt())
    assert world.control.rows()[B].reason == "coverage is 0.4, the threshold 0.95"
    with pytest.raises(Conflict, match="refused"):
        moves.publish(world.releases, B, attempt=world.attempt())


def test_epochs_grow_even_when_the_clock_goes_back(world):
    world.publish(A)
    first = world.live().epoch
    world.clock.now_s -= 10 * 86_400
    world.load(B)
    moves.publish(world.releases, B, attempt=world.attempt())
    assert world.live().epoch > first


def test_a_lost_reply_to_a_successful_move_is_success(world):
    world.publish(A)
    world.load(B)
    expected = world.live().epoch
    to = Pointer(B, expected + 1, A, "run-1", 0.0)
    assert world.control.move_pointer(to, expected_epoch=expected, row_by_generation={}) == to
    repeated_move = world.control.move_pointer(
        Pointer(B, expected + 9, A, "run-1", 0.0), expected_epoch=expected, row_by_generation={}
    )
    assert repeated_move == to and world.live() == to


def test_of_two_publishers_one_loses(world):
    world.publish(A)
    expected = world.live().epoch
    assert world.control.move_pointer(
        Pointer(B, expected + 1, A, "one", 0.0), expected_epoch=expected, row_by_generation={}
    )
    assert (
        world.control.move_pointer(
            Pointer(C, expected + 2, A, "two", 0.0), expected_epoch=expected, row_by_generation={}
        )
        is None
    )
    assert world.live().generation == B


def test_a_crash_between_move_and_done_is_settled_from_the_pointer(world):
    world.publish(A, B)
    number = all_releases(world.store)[-1].number
    world.store.local(done_path(number)).unlink()

    ledger = world.releases.ledger()

    assert ledger.live_generation == B and world.store.read(done_path(number)) is not None


def test_a_crash_between_intent_and_move_leaves_the_live_one(world, monkeypatch):
    world.publish(A)
    world.load(B)

    def crash(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Control, "move_pointer", crash)
        with pytest.raises(KeyboardInterrupt):
            moves.publish(world.releases, B, attempt="run-1")
    assert world.releases.ledger().live_generation == A
    assert moves.publish(world.releases, B, attempt="run-1").has_moved
    assert world.live().generation == B


def test_pages_never_expire_and_are_verified_where_they_are(world):
    """The loader marks what it writes, and no expiry empties the store after a broken night."""
    manifest = world.load(A)
    assert world.pages() == set(page_keys(world.keys, manifest))
    assert {world.client.ttl(key) for key in world.pages()} == {-1}
    root = world.store.local(generation_path(A))
    part = parts_of(manifest)[1]
    assert not load_part(world.client, world.keys, manifest, root, part)
    page = world.keys.page(A, "score", part.pages.first_page + 2)
    world.client.setrange(page, 7, b"x")
    with pytest.raises(CorruptArtefact, match="differs"):
        verify_part(world.client, world.keys, manifest, root, part)
    world.client.delete(page)
    with pytest.raises(CorruptArtefact, match="not in Redis"):
        verify_part(world.client, world.keys, manifest, root, part)


def test_rollback_works_with_redis_at_full_memory(own_redis, tmp_path, keyspace):
    with connect(own_redis.url, 5.0) as client:
        world = World(ArtefactStore(str(tmp_path / "artefacts")), client, keyspace)
        world.publish(A, B)
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("anything", b"x" * 4096)
        moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
        assert world.live().generation == A


def test_a_policy_that_evicts_pages_is_refused(own_redis, keyspace):
    with connect(own_redis.url, 5.0) as client:
        control = Control(client, keyspace)
        assert control.check_eviction_policy() == "volatile-lru"
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(Refused) as caught:
            control.check_eviction_policy()
    assert caught.value.details == {
        "rule": "maxmemory_policy", "value": "allkeys-lru", "threshold": "volatile-* or noeviction",
    }  # fmt: skip


def test_redis_errors_become_errors_of_larder(own_redis, keyspace):
    with pytest.raises(ConfigError, match="REDIS_URL"), connect(None, 1.0):
        pass
    with pytest.raises(ConfigError, match="cannot be used"), connect("http://x", 1.0):
        pass
    with connect(own_redis.url, 5.0) as client:
        client.config_set("maxmemory", 1)
    with pytest.raises(Refused, match="maxmemory"), connect(own_redis.url, 5.0) as client:
        client.set("x", "y")


def test_a_roll_back_moves_first_and_repairs_damaged_pages_after(world):
    world.publish(A, B)
    page = min(pages_of(world, A))
    sound = world.client.get(page)
    world.client.setrange(page, 7, b"x")
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    assert world.live().generation == A
    assert moves.repair_live(world.releases, A) == [page] and world.client.get(page) == sound
    assert moves.repair_live(world.releases, A) == [] == moves.repair_live(world.releases, B)


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_a_roll_back_loads_what_is_missing_before_it_moves(world, monkeypatch, damage):
    world.publish(A, B)
    page = max(pages_of(world, A))
    sound = world.client.get(page)
    world.client.delete(page)
    if damage == "cut short":
        world.client.set(page, sound[:-1])
    monkeypatch.setattr(Control, "move_pointer", lambda *_arguments, **_options: pytest.fail("moved"))
    with pytest.raises(pytest.fail.Exception, match="moved"):
        moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    assert world.client.get(page) == sound


def strlens(world):
    return world.client.info("commandstats").get("cmdstat_strlen", {"calls": 0})["calls"]


def test_a_roll_back_looks_at_as_many_pages_of_a_large_generation_as_of_a_small_one(world, monkeypatch):
    world.publish(A, B)
    monkeypatch.setattr("precompute.bulk.reload.PROBED_PAGES_MAX", 4)
    pages = sorted(pages_of(world, A), key=lambda page_key: int(page_key.rsplit(":", 1)[1]))
    inner = pages[1]
    sound = world.client.get(inner)
    world.client.delete(inner)
    strlen_calls_before = strlens(world)

    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())

    assert strlens(world) - strlen_calls_before <= 4 < len(pages)
    assert world.live().generation == A and moves.repair_live(world.releases, A) == [inner]
    assert world.client.get(inner) == sound


def test_a_roll_back_that_misses_one_page_looks_at_all(world, monkeypatch):
    world.publish(A, B)
    monkeypatch.setattr("precompute.bulk.reload.PROBED_PAGES_MAX", 2)
    pages = pages_of(world, A)
    world.client.delete(*pages)
    monkeypatch.setattr(Control, "move_pointer", lambda *_arguments, **_options: pytest.fail("moved"))

    with pytest.raises(pytest.fail.Exception, match="moved"):
        moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())

    assert pages_of(world, A) == pages


def test_publishing_streams_what_is_missing_and_only_that(world, monkeypatch):
    world.publish(A)
    manifest = world.load(B)
    page = world.keys.page(B, "score", 7)
    world.client.delete(page)
    streamed = []

    def stream(*arguments, **options):
        streamed.append(arguments[4].loaded_field)
        return load_part(*arguments, **options)

    monkeypatch.setattr("precompute.bulk.reload.load_part", stream)
    moves.publish(world.releases, B, attempt=world.attempt())

    assert streamed == ["score/1"] and world.live().generation == B
    assert pages_of(world, B) == set(page_keys(world.keys, manifest))


@pytest.mark.parametrize(("subpath", "text"), [("", "gone"), ("tables", "is missing from")])
def test_a_move_to_files_that_are_gone_is_a_conflict(world, subpath, text):
    world.publish(A, B)
    for key in pages_of(world, A):
        world.client.delete(key)
    world.store.delete(generation_path(A, subpath))
    with pytest.raises(Conflict, match=text):
        moves.roll_back(world.releases, target_generation=A, reason="bad", attempt=world.attempt())
    assert world.live().generation == B


def test_what_is_live_is_neither_refused_nor_marked_verified(world):
    world.publish(A)
    with pytest.raises(Conflict, match="live"):
        moves.refuse(world.releases, A, reason="late gate", attempt=world.attempt())
    world.releases.mark_verified(A, attempt=world.attempt())
    assert world.control.rows()[A].state is GenerationState.LIVE
    assert world.releases.ledger().live_generation == A and world.releases.state(A) is GenerationState.LIVE


def test_a_repeated_roll_back_changes_nothing_however_far_the_pointer_has_moved(world):
    world.publish(A, B)
    first = moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="run-1")
    world.publish(C)
    pointer_before = world.live()
    repeated_move = moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="run-1")
    assert not repeated_move.has_moved and repeated_move.pointer == first.pointer and world.live() == pointer_before


def test_a_repeated_publish_changes_nothing_however_far_the_pointer_has_moved(world):
    world.load(A)
    first = moves.publish(world.releases, A, attempt="run-1")
    world.publish(B)
    repeated_move = moves.publish(world.releases, A, attempt="run-1")
    assert not repeated_move.has_moved and repeated_move.pointer == first.pointer and world.live().generation == B


def test_a_cleared_run_publishes_again_what_was_verified_again(world):
    world.publish(A)
    world.load(B)
    moves.publish(world.releases, B, attempt="run-1")
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt="operator")
    with pytest.raises(Conflict, match=r"since then roll back of .* use a new attempt"):
        moves.publish(world.releases, B, attempt="run-1")
    world.releases.mark_verified(B, attempt="run-1")
    assert moves.publish(world.releases, B, attempt="run-1").has_moved
    assert world.live().generation == B


def test_a_manifest_written_by_a_new_verification_is_the_released_one(world):
    world.publish(A, B)
    path = generation_path(B, "manifest.json")
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    world.store.write(path, world.store.read(path) + b" ")
    world.releases.mark_verified(B, attempt=world.attempt())
    moves.publish(world.releases, B, attempt=world.attempt())
    world.store.write(path, world.store.read(path) + b" ")
    world.releases.mark_verified(B, attempt="a second run of the night")
    world.publish(C)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    assert world.live().generation == B


def test_releases_of_a_remote_store_carry_the_manifests_digest(redis_url, keyspace, tmp_path):
    with connect(redis_url, 5.0) as client:
        store = ArtefactStore(f"memory://{keyspace.namespace}", tmp_path)
        world = World(store, client, keyspace)
        raw = world.make(A).to_bytes()
        record = world.releases.record("pin", A, attempt="x")
        assert record.manifest_sha256 == manifest_digest(raw)


def test_every_release_file_is_written_once(world):
    world.publish(A)
    (published,) = all_releases(world.store)
    assert published.number == 1
    assert not world.store.write_once(intent_path(1), b"other")
    record = world.releases.record("pin", A, attempt="x")
    assert record.number == 2 and record.epoch > published.epoch


def test_a_writer_who_is_held_up_comes_after_what_was_written_meanwhile(world, monkeypatch):
    """Else whoever looked at the history before could never be sure of it."""
    world.publish(A)
    write_once = world.store.write_once
    meanwhile: list[Release] = []

    def held_up(path, data):
        if not meanwhile:
            monkeypatch.undo()
            meanwhile.append(world.releases.record("pin", A, attempt="in between"))
        return write_once(path, data)

    monkeypatch.setattr(world.store, "write_once", held_up)
    late = world.releases.record("unpin", A, attempt="held up")

    assert [record.attempt for record in all_releases(world.store)][1:] == ["in between", "held up"]
    assert late.number == meanwhile[0].number + 1 and late.epoch > meanwhile[0].epoch


def test_records_of_earlier_versions_go_on(world):
    """They were stored under their epochs."""
    world.make(A)
    old = Release(1_800_000_000_000, "publish", A, None, "old", 1.0)
    world.store.write_once(intent_path(old.epoch), old.to_bytes())
    world.store.write_once(done_path(old.epoch), b"")

    new = world.releases.record("pin", A, attempt="new")

    assert all_releases(world.store) == [replace(old, is_done=True), new]
    assert new.number == old.epoch + 1 == new.stored_number


@pytest.mark.parametrize("missing_number", [1, 2])
def test_a_record_that_is_missing_is_named(world, missing_number):
    for name in ("one", "two", "three"):
        world.releases.record("pin", A, attempt=name)
    world.store.local(intent_path(missing_number)).unlink()

    with pytest.raises(CorruptArtefact, match=f"releases/{missing_number}.json") as caught:
        all_releases(world.store)
    assert "missing" in caught.value.message and world.store.url in caught.value.message


def test_a_folder_that_was_listed_while_it_grew_is_listed_again(world, monkeypatch):
    for name in ("one", "two", "three"):
        world.releases.record("pin", A, attempt=name)
    names, listed_paths = world.store.names, []

    def newest_first(path):
        listed_paths.append(path)
        return [file_name for file_name in names(path) if file_name != "2.json" or len(listed_paths) > 1]

    monkeypatch.setattr(world.store, "names", newest_first)
    assert [record.attempt for record in all_releases(world.store)] == ["one", "two", "three"]
    assert len(listed_paths) == 2
