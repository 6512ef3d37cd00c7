"""Publish, roll back, restore and retire against a real Redis and a real folder."""

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import redis
import xxhash

from cache.artefacts import (
    ArtefactStore,
    describe,
    generation_path,
    read_manifest,
    write_atomically,
)
from cache.errors import ConfigError, Conflict, CorruptArtefact, Refused
from cache.keys import Keyspace
from cache.manifest import (
    Artefact,
    DirectoryPart,
    EntitySet,
    ItemFiles,
    Manifest,
    Producer,
    Table,
    TablePart,
)
from cache.records import Layout, encode_values
from cache.releases import (
    Pointer,
    all_releases,
    done_path,
    intent_path,
    manifest_digest,
    newest_release,
)
from precompute import release, sweep
from precompute import restore as restoring
from precompute.control import Control, Row, connect
from precompute.load import load_part, page_keys, parts_of, verify_part
from precompute.release import Releases
from precompute.reload import reload
from precompute.restore import restore
from precompute.states import State
from precompute.sweep import drop_old_rows, retire, sweepable

A, B, C, D = (f"2026010{day}T000000Z-{'0' * 11}{day}" for day in (1, 2, 3, 4))
LAYOUT = Layout("value", 4, "f4")


class Clock:
    """Unix seconds that move only when told."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class TimedControl(Control):
    """Redis' own clock is the test's."""

    def __init__(self, client: "redis.Redis", keys: Keyspace, clock: Clock) -> None:
        super().__init__(client, keys)
        self.time = clock  # type: ignore[method-assign]


class World:
    """A store with tiny generations and the releases over them."""

    def __init__(self, store: ArtefactStore, client: "redis.Redis", keys: Keyspace) -> None:
        self.store, self.client, self.keys, self.clock = store, client, keys, Clock()
        self.control = TimedControl(client, keys, self.clock)
        self.releases = Releases(store, self.control)
        self.numbers = itertools.count()

    def attempt(self) -> str:
        """A name that no other attempt has."""
        return f"attempt-{next(self.numbers)}"

    def make(self, generation: str, records: int = 50) -> Manifest:
        """A generation of one value table in two parts, pages of 10 records."""
        root = self.store.local(generation_path(generation))
        seed = int(hashlib.sha256(generation.encode()).hexdigest()[:8], 16)
        rng = np.random.default_rng(seed)
        parts, page = [], 0
        for number in range(2):
            name = f"tables/score/{number:04d}"
            marks = rng.integers(0, 2**63, records, dtype=np.uint64)
            data = encode_values(LAYOUT, marks, rng.random((records, 4), np.float32), 0).tobytes()
            write_atomically(root / f"{name}.pages", data)
            size = 10 * LAYOUT.size_bytes
            sums = [
                xxhash.xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)
            ]
            write_atomically(root / f"{name}.sums", np.array(sums, "<u8").tobytes())
            files = (describe(root, f"{name}.pages"), describe(root, f"{name}.sums"))
            parts.append(TablePart(page, len(sums), records, *files))
            page += len(sums)
        nothing = Artefact("", 0, "")
        manifest = Manifest(
            namespace=self.keys.namespace,
            generation=generation,
            data_until=0,
            created_at=0,
            bundle_digest="",
            inputs_digest="",
            entity_sets={"user": EntitySet("user", 0, 0, (DirectoryPart(0, 0, nothing),))},
            items=ItemFiles(nothing, nothing, nothing, nothing, 0, 0),
            tables={"score": Table("score", "user", Producer("none"), LAYOUT, 10, tuple(parts))},
            models={},
            indexes={},
            defaults=nothing,
        )
        self.store.write(generation_path(generation, "manifest.json"), manifest.to_bytes())
        return manifest

    def load(self, generation: str) -> Manifest:
        """Rows first, then pages, as the pipeline does."""
        manifest = self.make(generation)
        self.control.set_row(generation, Row(State.BEGUN, self.clock()))
        reload(self.control, self.keys, self.store, generation, chunk_bytes=1000)
        self.control.set_row(generation, Row(State.VERIFIED, self.clock()))
        return manifest

    def publish(self, *generations: str) -> None:
        """Load and publish each, a day apart."""
        for generation in generations:
            self.load(generation)
            self.clock.now += 86_400
            self.releases.publish(generation, attempt=self.attempt())

    def live(self) -> Pointer:
        """What readers follow."""
        pointer = self.control.pointer()
        assert pointer is not None
        return pointer

    def pages(self) -> set[str]:
        """All page keys in Redis (a test may scan)."""
        pattern = f"larder:1:{self.keys.namespace}:g:*"
        return {
            key.decode() for key in self.client.scan_iter(pattern) if not key.endswith(b":loaded")
        }


@pytest.fixture
def world(tmp_path, redis_url, keyspace) -> Iterator[World]:
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


def test_publishing_moves_the_pointer_and_writes_down_why_first(world):
    world.publish(A, B)

    assert (world.live().generation, world.live().previous) == (B, A)
    records = all_releases(world.store)
    assert [(each.action, each.generation, each.done) for each in records] == [
        ("publish", A, True),
        ("publish", B, True),
    ]
    assert world.live().epoch == records[-1].epoch
    assert world.control.rows()[A].state is State.SUPERSEDED
    newest = newest_release(world.store)
    assert newest is not None and newest.generation == B


def test_publishing_again_changes_nothing(world):
    world.publish(A)
    before = world.live()
    moved = world.releases.publish(A, attempt=world.attempt())
    assert not moved.changed and world.live() == before


def test_p19_older_data_is_never_published_over_newer(world):
    """PITFALLS P19: clears and backfills do not reorder generations."""
    world.load(A)
    world.publish(B)
    with pytest.raises(Conflict, match="older than"):
        world.releases.publish(A, attempt=world.attempt())
    assert world.live().generation == B


@pytest.mark.parametrize(
    "state", [each for each in State if each not in (State.VERIFIED, State.LIVE)]
)
def test_only_a_verified_generation_is_published(world, state):
    world.publish(A)
    world.load(B)
    world.control.set_row(B, Row(state, 0.0))
    with pytest.raises(Conflict):
        world.releases.publish(B, attempt=world.attempt())
    assert world.live().generation == A


def test_p4_and_p21_rolling_back_twice_never_meets_a_bad_generation(world):
    """PITFALLS P4, P21: previous is the newest superseded one, never one rolled back."""
    world.publish(A, B, C)
    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    assert (world.live().generation, world.live().previous) == (B, A)
    world.releases.roll_back(to=None, reason="bad too", attempt=world.attempt())
    assert (world.live().generation, world.live().previous) == (A, None)
    with pytest.raises(Conflict, match="no earlier"):
        world.releases.roll_back(to=None, reason="", attempt=world.attempt())
    for gone in (B, C):
        with pytest.raises(Conflict, match="rolled_back"):
            world.releases.roll_back(to=gone, reason="", attempt=world.attempt())
        with pytest.raises(Conflict, match="rolled_back"):
            world.releases.publish(gone, attempt=world.attempt())


def test_a_rolled_back_generation_returns_after_a_new_verification_only(world):
    world.publish(A, B)
    world.releases.roll_back(to=A, reason="bad", attempt=world.attempt())
    world.releases.mark_verified(B, attempt=world.attempt())
    world.releases.publish(B, attempt=world.attempt())
    assert (world.live().generation, world.live().previous) == (B, A)


def test_a_later_night_can_be_published_after_a_rollback(world):
    """PITFALLS P4 (Venice #2785): a stale guard must not block the next push."""
    world.publish(A, B)
    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    world.publish(C)
    assert (world.live().generation, world.live().previous) == (C, A)


def test_a_refused_generation_cannot_be_published(world):
    world.publish(A)
    world.load(B)
    world.releases.refuse(B, reason="coverage is 0.4, the threshold 0.95", attempt=world.attempt())
    with pytest.raises(Conflict, match="refused"):
        world.releases.publish(B, attempt=world.attempt())


def test_epochs_grow_even_when_the_clock_goes_back(world):
    world.publish(A)
    first = world.live().epoch
    world.clock.now -= 10 * 86_400
    world.load(B)
    world.releases.publish(B, attempt=world.attempt())
    assert world.live().epoch > first


def test_a_lost_reply_to_a_successful_move_is_success(world):
    world.publish(A)
    world.load(B)
    expected = world.live().epoch
    to = Pointer(B, expected + 1, A, "run-1", 0.0)
    assert world.control.move(to, expected_epoch=expected, rows={}) == to
    again = world.control.move(
        Pointer(B, expected + 9, A, "run-1", 0.0), expected_epoch=expected, rows={}
    )
    assert again == to and world.live() == to


def test_of_two_publishers_one_loses(world):
    world.publish(A)
    expected = world.live().epoch
    assert world.control.move(
        Pointer(B, expected + 1, A, "one", 0.0), expected_epoch=expected, rows={}
    )
    assert (
        world.control.move(
            Pointer(C, expected + 2, A, "two", 0.0), expected_epoch=expected, rows={}
        )
        is None
    )
    assert world.live().generation == B


def test_a_crash_between_move_and_done_is_settled_from_the_pointer(world):
    world.publish(A, B)
    world.store.local(done_path(world.live().epoch)).unlink()

    ledger = world.releases.ledger()

    assert ledger.live == B and world.store.read(done_path(world.live().epoch)) is not None


def test_a_crash_between_intent_and_move_leaves_the_live_one(world, monkeypatch):
    world.publish(A)
    world.load(B)

    def crash(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Control, "move", crash)
        with pytest.raises(KeyboardInterrupt):
            world.releases.publish(B, attempt="run-1")
    assert world.releases.ledger().live == A
    assert world.releases.publish(B, attempt="run-1").changed
    assert world.live().generation == B


def test_redis_lost_is_restored_under_a_new_epoch(world):
    world.publish(A, B)
    before, pages = world.live(), world.pages()
    for key in world.client.scan_iter(f"larder:1:*{world.keys.namespace}*"):
        world.client.delete(key)

    pointer, loaded, _ = restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)

    assert (pointer.generation, pointer.previous) == (before.generation, before.previous)
    assert pointer.epoch > before.epoch and loaded == [B, A]
    assert world.pages() == pages
    assert (
        world.control.rows()[B].state is State.LIVE
        and world.control.rows()[A].state is State.SUPERSEDED
    )
    again, _, _ = restore(world.releases, world.keys, attempt="restore-2", chunk_bytes=1000)
    assert again == pointer


def test_p22_a_pointer_from_an_older_snapshot_is_not_trusted(world):
    """PITFALLS P22: Redis restored from an old snapshot must not take readers or publishers back."""
    world.publish(A)
    old = world.client.get(world.keys.live)
    world.publish(B)
    world.client.set(world.keys.live, old)
    world.load(C)
    with pytest.raises(Conflict, match="older pointer"):
        world.releases.publish(C, attempt=world.attempt())
    pointer, _, _ = restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)
    assert pointer.generation == B and pointer.epoch > Pointer.from_bytes(old).epoch


def test_publishing_into_an_emptied_redis_is_refused_until_restored(world):
    world.publish(A)
    world.load(B)
    world.client.delete(world.keys.live)
    with pytest.raises(Conflict, match="restore"):
        world.releases.publish(B, attempt=world.attempt())


def test_pages_never_expire_and_are_verified_where_they_are(world):
    """Invariant 4, the loader's marks, and PITFALLS P2: no expiry empties the store after a broken night."""
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


def test_p8_and_p9_retiring_removes_every_key_and_file_and_nothing_else(world):
    """PITFALLS P8, P9: keys come from the manifest, in small batches; a swept generation leaves nothing."""
    world.publish(A, B, C, D)
    world.clock.now += 100
    assert sweepable(world.releases, keep=1, grace_s=60) == [A, B]

    for generation in (A, B):
        retire(world.releases, world.keys, generation, attempt=world.attempt())

    assert {key.split(":")[4] for key in world.pages()} == {C, D}
    assert world.store.names("generations") == [C, D]
    assert world.control.rows()[A].state is State.RETIRED
    world.clock.now += 90_000
    assert drop_old_rows(world.releases, overlay_ttl_s=86_400) == 2
    assert set(world.control.rows()) == {C, D}


def test_retire_spares_what_is_held_pinned_or_just_superseded(world):
    world.publish(A, B, C, D)
    assert sweepable(world.releases, keep=1, grace_s=60) == [A, B]
    world.releases.pin(A, reason="audit", expires_at=None, attempt=world.attempt())
    beat = b'{"replica":"r1","serving":"%s","holds":["%s"]}' % (D.encode(), B.encode())
    world.client.zadd(world.keys.replicas, {beat: world.clock()})
    assert sweepable(world.releases, keep=1, grace_s=60) == []
    world.clock.now += 4
    assert sweepable(world.releases, keep=1, grace_s=60) == [B]
    assert sweepable(world.releases, keep=0, grace_s=4 * 86_400) == []


def test_a_retirement_cut_short_is_finished_and_never_rolled_back_to(world, monkeypatch):
    world.publish(A, B, C)
    world.clock.now += 100

    def crash(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("precompute.sweep.unlink_pages", crash)
        with pytest.raises(KeyboardInterrupt):
            retire(world.releases, world.keys, A, attempt=world.attempt())
    with pytest.raises(Conflict, match="retired"):
        world.releases.roll_back(to=A, reason="", attempt=world.attempt())
    assert sweepable(world.releases, keep=5, grace_s=60) == [A]
    retire(world.releases, world.keys, A, attempt=world.attempt())
    assert world.store.names("generations") == [B, C]


def test_rollback_works_with_redis_at_full_memory(own_redis, tmp_path, keyspace):
    with connect(own_redis.url, 5.0) as client:
        world = World(ArtefactStore(str(tmp_path / "artefacts")), client, keyspace)
        world.publish(A, B)
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("anything", b"x" * 4096)
        world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
        assert world.live().generation == A


def test_a_policy_that_evicts_pages_is_refused(own_redis, keyspace):
    with connect(own_redis.url, 5.0) as client:
        control = Control(client, keyspace)
        assert control.check_policy() == "volatile-lru"
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(Refused) as caught:
            control.check_policy()
    assert caught.value.details == {
        "rule": "maxmemory_policy", "value": "allkeys-lru", "threshold": "volatile-* or noeviction",
    }  # fmt: skip


def test_redis_errors_come_in_words_of_ours(own_redis, keyspace):
    with pytest.raises(ConfigError, match="REDIS_URL"), connect(None, 1.0):
        pass
    with pytest.raises(ConfigError, match="cannot be used"), connect("http://x", 1.0):
        pass
    with connect(own_redis.url, 5.0) as client:
        client.config_set("maxmemory", 1)
    with pytest.raises(Refused, match="maxmemory"), connect(own_redis.url, 5.0) as client:
        client.set("x", "y")


def meanwhile(monkeypatch, owner, name, what):
    """Run `what` once, just after (or, for Control.move, just before) the next call of `owner.name`."""
    real, first = getattr(owner, name), [True]

    def call(*arguments, **options):
        before = name == "move"
        if before and first and first.pop():
            what()
        answer = real(*arguments, **options)
        if not before and first and first.pop():
            what()
        return answer

    monkeypatch.setattr(owner, name, call)


def lose_redis(world):
    for key in world.client.scan_iter(f"larder:1:*{world.keys.namespace}*"):
        world.client.delete(key)


def pages_of(world, generation):
    return {key for key in world.pages() if key.split(":")[4] == generation}


def test_a_restore_never_undoes_a_roll_back_made_while_it_streams(world, monkeypatch):
    world.publish(A, B)

    def roll_back():
        world.releases.roll_back(to=None, reason="bad", attempt="operator")

    meanwhile(monkeypatch, restoring, "reload", roll_back)
    pointer, loaded, _ = restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)

    assert pointer == world.live() and pointer.generation == A and loaded == [A]
    assert world.control.rows()[B].state is State.ROLLED_BACK
    assert world.releases.ledger().state(B) is State.ROLLED_BACK


def test_a_restore_never_replaces_a_pointer_that_no_record_explains(world):
    world.publish(A)
    unknown = Pointer(B, world.live().epoch + 1, A, "elsewhere", 0.0)
    assert world.control.move(unknown, expected_epoch=world.live().epoch, rows={})
    with pytest.raises(Conflict, match="no release record explains"):
        restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)
    world.load(C)
    with pytest.raises(Conflict, match="no release record explains"):
        world.releases.publish(C, attempt=world.attempt())
    assert world.live() == unknown


def test_two_restores_at_once_end_with_one_pointer(world, monkeypatch):
    world.publish(A, B)
    lose_redis(world)

    def again():
        restore(world.releases, world.keys, attempt="other", chunk_bytes=1000)

    meanwhile(monkeypatch, restoring, "reload", again)
    pointer, _, _ = restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)
    assert pointer == world.live() and pointer.attempt == "other"


def test_a_roll_back_after_a_restore_lands_on_loaded_pages_only(world):
    world.publish(A, B, C)
    manifest = read_manifest(world.store, A)
    lose_redis(world)
    restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)
    assert not pages_of(world, A)

    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    world.releases.roll_back(to=None, reason="bad too", attempt=world.attempt())

    assert world.live().generation == A
    assert pages_of(world, A) == set(page_keys(world.keys, manifest))


def test_a_roll_back_moves_first_and_repairs_damaged_pages_after(world):
    world.publish(A, B)
    page = min(pages_of(world, A))
    sound = world.client.get(page)
    world.client.setrange(page, 7, b"x")
    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    assert world.live().generation == A
    assert world.releases.mend(A) == [page] and world.client.get(page) == sound
    assert world.releases.mend(A) == [] == world.releases.mend(B)


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_a_roll_back_loads_what_is_missing_before_it_moves(world, monkeypatch, damage):
    world.publish(A, B)
    page = max(pages_of(world, A))
    sound = world.client.get(page)
    world.client.delete(page)
    if damage == "cut short":
        world.client.set(page, sound[:-1])
    monkeypatch.setattr(Control, "move", lambda *_arguments, **_options: pytest.fail("moved"))
    with pytest.raises(pytest.fail.Exception, match="moved"):
        world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    assert world.client.get(page) == sound


def test_publishing_streams_what_is_missing_and_only_that(world, monkeypatch):
    world.publish(A)
    manifest = world.load(B)
    page = world.keys.page(B, "score", 7)
    world.client.delete(page)
    streamed = []

    def stream(*arguments, **options):
        streamed.append(arguments[4].name)
        return load_part(*arguments, **options)

    monkeypatch.setattr("precompute.reload.load_part", stream)
    world.releases.publish(B, attempt=world.attempt())

    assert streamed == ["score/1"] and world.live().generation == B
    assert pages_of(world, B) == set(page_keys(world.keys, manifest))


def test_a_generation_verified_again_before_redis_was_lost_is_published_with_its_pages(world):
    world.publish(A, B)
    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    world.releases.mark_verified(B, attempt=world.attempt())
    lose_redis(world)
    restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)
    world.releases.publish(B, attempt=world.attempt())
    assert world.live().generation == B and len(pages_of(world, B)) == 10


@pytest.mark.parametrize("what", ["", "tables"])
def test_a_move_to_files_that_are_gone_is_a_conflict(world, what):
    world.publish(A, B)
    for key in pages_of(world, A):
        world.client.delete(key)
    world.store.delete(generation_path(A, what))
    with pytest.raises(Conflict, match="gone"):
        world.releases.roll_back(to=A, reason="bad", attempt=world.attempt())
    assert world.live().generation == B


def test_older_data_is_not_published_over_newer_by_a_publisher_that_looked_earlier(
    world, monkeypatch
):
    world.publish(A)
    world.load(B)
    world.load(C)

    def other():
        world.releases.publish(C, attempt="other")

    meanwhile(monkeypatch, release, "load_missing", other)
    with pytest.raises(Conflict, match="older than"):
        world.releases.publish(B, attempt=world.attempt())
    assert world.live().generation == C and world.control.rows()[C].state is State.LIVE


def test_a_roll_back_never_lands_on_a_generation_retired_meanwhile(world, monkeypatch):
    world.publish(A, B, C)

    def other():
        retire(world.releases, world.keys, A, attempt="sweep")
        world.client.set(world.keys.page(A, "score", 3), b"streamed by the roll back meanwhile")

    meanwhile(monkeypatch, Control, "move", other)
    with pytest.raises(Conflict, match="retired by now"):
        world.releases.roll_back(to=A, reason="bad", attempt=world.attempt())
    assert world.live().generation == C and not pages_of(world, A)
    assert world.releases.ledger().state(A) is State.RETIRED


def test_a_publish_never_lands_on_a_generation_refused_meanwhile(world, monkeypatch):
    world.publish(A)
    world.load(B)

    def other():
        world.releases.refuse(B, reason="bad", attempt="gate")

    meanwhile(monkeypatch, Control, "move", other)
    with pytest.raises(Conflict, match="refused by now"):
        world.releases.publish(B, attempt=world.attempt())
    assert world.live().generation == A


def test_rows_change_only_under_the_pointer_that_the_writer_saw(world):
    world.publish(A, B, C)
    world.control.set_row(A, Row(State.RETIRED, 0.0))
    rows = {each: Row(State.REFUSED, 0.0) for each in (A, B)}
    epoch = world.live().epoch

    assert not world.control.mark(rows, expected_epoch=epoch - 1)
    assert not world.control.mark(rows, expected_epoch=0)
    with pytest.raises(Conflict):
        world.control.mark(rows, expected_epoch=epoch, unless="previous")
    with pytest.raises(Conflict):
        world.control.mark({C: rows[A]}, expected_epoch=epoch, unless="live")
    assert world.control.rows()[B].state is State.SUPERSEDED
    assert world.control.mark(rows, expected_epoch=epoch, unless="live")
    found = world.control.rows()
    assert (found[A].state, found[B].state) == (State.RETIRED, State.REFUSED)


def test_a_pointer_never_names_a_retired_generation_as_previous(world):
    world.publish(A, B)
    world.control.set_row(A, Row(State.RETIRED, 0.0))
    epoch = world.live().epoch
    to = Pointer(C, epoch + 1, A, "x", 0.0)
    assert world.control.move(to, expected_epoch=epoch, rows={}) is None
    world.publish(C)
    assert world.live().previous == B
    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    assert (world.live().generation, world.live().previous) == (B, None)


def test_what_is_live_is_neither_refused_nor_marked_verified(world):
    world.publish(A)
    with pytest.raises(Conflict, match="live"):
        world.releases.refuse(A, reason="late gate", attempt=world.attempt())
    world.releases.mark_verified(A, attempt=world.attempt())
    assert world.control.rows()[A].state is State.LIVE
    assert world.releases.ledger().live == A and world.releases.state(A) is State.LIVE


def test_a_generation_made_live_meanwhile_is_not_retired(world, monkeypatch):
    world.publish(A, B, C)

    def other():
        world.releases.roll_back(to=A, reason="bad", attempt="operator")

    meanwhile(monkeypatch, sweep, "_demand_unneeded", other)
    with pytest.raises(Conflict):
        retire(world.releases, world.keys, A, attempt="sweep")
    assert world.live().generation == A and len(pages_of(world, A)) == 10
    assert world.control.rows()[A].state is State.LIVE


@pytest.mark.parametrize("when", ["before the mark", "after the mark"])
def test_a_pin_or_a_reader_that_comes_late_still_stops_a_retirement(world, monkeypatch, when):
    world.publish(A, B, C)

    def pin():
        world.releases.record("pin", A, attempt="auditor", reason="audit")

    if when == "before the mark":
        pin()
    else:
        meanwhile(monkeypatch, Control, "mark", pin)
    with pytest.raises(Conflict, match="pinned"):
        retire(world.releases, world.keys, A, attempt="sweep")
    world.releases.unpin(A, attempt="auditor")
    beat = b'{"replica":"r1","serving":"%s","holds":[]}' % A.encode()
    world.client.zadd(world.keys.replicas, {beat: world.clock()})
    with pytest.raises(Conflict, match="holds it"):
        retire(world.releases, world.keys, A, attempt="sweep")
    assert len(pages_of(world, A)) == 10 and world.releases.state(A) is State.SUPERSEDED


def test_what_is_being_retired_cannot_be_pinned(world):
    world.publish(A, B, C)
    world.control.set_row(A, Row(State.RETIRED, world.clock()))
    with pytest.raises(Conflict, match="being retired"):
        world.releases.pin(A, reason="audit", expires_at=None, attempt=world.attempt())
    assert not world.releases.ledger().is_pinned(A, world.clock())


def test_a_repeated_roll_back_changes_nothing_however_far_the_pointer_has_moved(world):
    world.publish(A, B)
    first = world.releases.roll_back(to=None, reason="bad", attempt="run-1")
    world.publish(C)
    before = world.live()
    again = world.releases.roll_back(to=None, reason="bad", attempt="run-1")
    assert not again.changed and again.pointer == first.pointer and world.live() == before


def test_a_repeated_publish_changes_nothing_however_far_the_pointer_has_moved(world):
    world.load(A)
    first = world.releases.publish(A, attempt="run-1")
    world.publish(B)
    again = world.releases.publish(A, attempt="run-1")
    assert not again.changed and again.pointer == first.pointer and world.live().generation == B


def test_a_cleared_run_publishes_again_what_was_verified_again(world):
    world.publish(A)
    world.load(B)
    world.releases.publish(B, attempt="run-1")
    world.releases.roll_back(to=None, reason="bad", attempt="operator")
    assert not world.releases.publish(B, attempt="run-1").changed
    world.releases.mark_verified(B, attempt="run-1")
    assert world.releases.publish(B, attempt="run-1").changed
    assert world.live().generation == B


@pytest.mark.parametrize("state", [State.BEGUN, State.LOADED, State.VERIFIED])
def test_an_unfinished_night_is_abandoned_and_removed_once_it_is_old_news(world, state):
    """PITFALLS P9: nothing is left behind for ever."""
    world.load(A)
    world.control.set_row(A, Row(state, world.clock()))
    world.load(D)
    world.control.set_row(D, Row(state, world.clock()))
    world.publish(B)
    assert sweepable(world.releases, keep=1, grace_s=60) == []
    world.clock.now += 1
    assert sweepable(world.releases, keep=1, grace_s=60, abandon_after_s=90_000) == []
    assert sweepable(world.releases, keep=1, grace_s=60) == [A]

    retire(world.releases, world.keys, A, attempt="sweep")

    actions = [each.action for each in all_releases(world.store) if each.generation == A]
    assert actions == ["abandon", "retire"]
    assert world.store.names("generations") == [B, D] and not pages_of(world, A)
    assert sweepable(world.releases, keep=1, grace_s=60) == []
    with pytest.raises(Conflict):
        retire(world.releases, world.keys, D, attempt="sweep")


def test_a_folder_that_no_row_knows_is_swept_by_its_age(world):
    world.make(A)
    unfinished = "20260101T000000Z-aaaaaaaaaaaa"
    world.store.write(generation_path(unfinished, "items/ids.bin"), b"x")
    world.store.write("generations/notes.txt", b"x")
    world.publish(B)
    assert sweepable(world.releases, keep=1, grace_s=60) == [A]
    world.clock.now += 90_000
    assert sweepable(world.releases, keep=1, grace_s=60) == [A, unfinished]
    for generation in (A, unfinished):
        retire(world.releases, world.keys, generation, attempt="sweep")
    assert world.store.names("generations") == [B, "notes.txt"]


def test_a_held_or_pinned_unfinished_night_stays(world):
    world.load(A)
    world.publish(B)
    world.clock.now += 90_000
    world.releases.pin(A, reason="audit", expires_at=None, attempt=world.attempt())
    assert sweepable(world.releases, keep=1, grace_s=60) == []
    with pytest.raises(Conflict, match="pinned"):
        retire(world.releases, world.keys, A, attempt="sweep")


def test_a_manifest_that_is_not_the_released_one_is_neither_restored_nor_rolled_back_to(world):
    world.publish(A, B)
    path = generation_path(A, "manifest.json")
    released = world.store.read(path)
    assert all_releases(world.store)[0].manifest_sha256 == manifest_digest(released)
    other = released.replace(b'"inputs_digest": ""', b'"inputs_digest": "x"')
    assert other != released
    world.store.write(path, other)
    with pytest.raises(CorruptArtefact, match="release record"):
        world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    _, loaded, _ = restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)
    assert loaded == [B]
    world.store.write(path, released)
    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    world.store.write(path, other)
    with pytest.raises(CorruptArtefact, match="release record"):
        restore(world.releases, world.keys, attempt="restore", chunk_bytes=1000)


def test_a_manifest_written_by_a_new_verification_is_the_released_one(world):
    world.publish(A, B)
    path = generation_path(B, "manifest.json")
    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    world.store.write(path, world.store.read(path) + b" ")
    world.releases.mark_verified(B, attempt=world.attempt())
    world.releases.publish(B, attempt=world.attempt())
    world.store.write(path, world.store.read(path) + b" ")
    world.releases.mark_verified(B, attempt="a second run of the night")
    world.publish(C)
    world.releases.roll_back(to=None, reason="bad", attempt=world.attempt())
    assert world.live().generation == B


def test_releases_of_a_remote_store_carry_the_manifests_digest(redis_url, keyspace, tmp_path):
    with connect(redis_url, 5.0) as client:
        store = ArtefactStore(f"memory://{keyspace.namespace}", tmp_path)
        world = World(store, client, keyspace)
        raw = world.make(A).to_bytes()
        record = world.releases.record("pin", A, attempt="x")
        assert record.manifest_sha256 == manifest_digest(raw)


def test_a_move_overtaken_before_it_was_written_down_as_done_is_not_forgotten(world, monkeypatch):
    """A publisher dies right after its move; the next one settles that before it moves on."""
    world.publish(A)
    world.load(B)

    def die(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "write_once", keep_intents(world.store.write_once, die))
        with pytest.raises(KeyboardInterrupt):
            world.releases.publish(B, attempt="dies")
    died = world.live()
    assert died.generation == B and world.store.read(done_path(died.epoch)) is None

    world.publish(C)

    assert world.store.read(done_path(died.epoch)) is not None
    ledger = world.releases.ledger()
    assert (ledger.live, ledger.previous, ledger.state(B)) == (C, B, State.SUPERSEDED)
    assert world.live().previous == B


def test_a_mover_that_looked_before_anothers_move_never_replaces_it(world, monkeypatch):
    """Nobody can overtake a move whose intent is still open: the look and the compare-and-set share one epoch."""
    world.publish(A)
    world.load(B)
    world.load(C)

    def other():
        def die(*_arguments, **_options):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(world.store, "write_once", keep_intents(world.store.write_once, die))
            with pytest.raises(KeyboardInterrupt):
                world.releases.publish(B, attempt="dies")

    meanwhile(monkeypatch, Control, "move", other)
    with pytest.raises(Conflict, match="another publisher"):
        world.releases.publish(C, attempt="late")
    assert world.live().generation == B
    world.releases.publish(C, attempt="late")
    moves = [(each.generation, each.done) for each in all_releases(world.store)]
    assert moves == [(A, True), (C, False), (B, True), (C, True)]


def keep_intents(write_once, die):
    return lambda path, data: die() if path.endswith(".done") else write_once(path, data)


def test_every_release_file_is_written_once(world):
    world.publish(A)
    epoch = world.live().epoch
    assert not world.store.write_once(intent_path(epoch), b"other")
    record = world.releases.record("pin", A, attempt="x")
    assert record.epoch > epoch
