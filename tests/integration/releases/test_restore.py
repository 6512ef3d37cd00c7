"""Redis lost, emptied or taken back to an older snapshot: restored from the release records."""

from collections.abc import Iterator

import pytest

from cache.control.control_keys import RegistryRow
from cache.control.states import GenerationState
from cache.errors import Conflict, CorruptArtefact
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.store.releases import Pointer, all_releases, manifest_digest
from precompute.bulk.governor import Governor
from precompute.bulk.load import page_keys
from precompute.releases import moves
from precompute.releases.recovery import describe_forgotten_facts, restore_redis
from precompute.releases.sweep import retire
from tests.integration.release_world import A, B, C, D, World, keep_intents, lose_redis, pages_of


@pytest.fixture
def world(tmp_path, redis_url, keyspace) -> Iterator[World]:
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


def test_a_restore_keeps_the_time_of_the_publish(world):
    world.publish(A, B)
    published_at = world.live().published_at
    world.clock.now_s += 3_600
    for key in world.client.scan_iter(f"larder:1:*{world.keys.namespace}*"):
        world.client.delete(key)

    pointer, _, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)

    assert pointer.published_at == published_at


def test_redis_lost_is_restored_under_a_new_epoch(world):
    world.publish(A, B)
    pointer_before, pages = world.live(), world.pages()
    for key in world.client.scan_iter(f"larder:1:*{world.keys.namespace}*"):
        world.client.delete(key)

    pointer, loaded, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)

    assert (pointer.generation, pointer.previous) == (pointer_before.generation, pointer_before.previous)
    assert pointer.epoch > pointer_before.epoch and loaded == [B, A]
    assert world.pages() == pages
    assert (
        world.control.rows()[B].state is GenerationState.LIVE
        and world.control.rows()[A].state is GenerationState.SUPERSEDED
    )
    second_pointer, _, _ = restore_redis(world.releases, attempt="restore-2", chunk_bytes=1000)
    assert second_pointer == pointer


class Paced(Governor):
    """Only counts what asks for leave."""

    piece_bytes = 1024

    def __init__(self) -> None:
        self.paced = 0

    def pace(self, size_bytes: int) -> None:
        self.paced += size_bytes

    def own_reads(self, count: int) -> None:
        pass


def test_what_readers_wait_for_comes_flat_out_and_the_previous_one_makes_way(world):
    world.publish(A)
    lose_redis(world)
    governor = Paced()
    restore_redis(world.releases, attempt="one", chunk_bytes=1000, governor=governor)
    assert governor.paced == 0 and len(pages_of(world, A)) == 10
    # Nothing is missing, so no reader waits: pages are read back at the governor's pace.
    restore_redis(world.releases, attempt="two", chunk_bytes=1000, governor=governor)
    assert governor.paced > 0

    world.publish(B)
    world.client.delete(*world.client.keys(f"larder:1:{world.keys.namespace}:g:{A}*"))
    governor = Paced()
    _, loaded, _ = restore_redis(world.releases, attempt="three", chunk_bytes=1000, governor=governor)
    assert loaded == [B, A] and governor.paced > 0 and len(pages_of(world, A)) == 10


def test_pages_missing_before_a_publish_or_a_canary_are_governed_and_before_a_roll_back_not(world):
    world.publish(A)
    for generation, act in (
        (B, lambda governor: moves.start_canary(world.releases, B, 5.0, "canary", governor=governor)),
        (C, lambda governor: moves.publish(world.releases, C, attempt="publish", governor=governor)),
    ):
        world.load(generation)
        world.client.delete(*world.client.keys(f"larder:1:{world.keys.namespace}:g:{generation}*"))
        governor = Paced()
        act(governor)
        assert governor.paced > 0 and len(pages_of(world, generation)) == 10


def test_a_restore_names_what_redis_alone_knew(world):
    world.publish(A)
    world.load(B)
    moves.start_canary(world.releases, B, 5.0, world.attempt())
    lose_redis(world)
    view_before = world.releases.view()

    pointer, _, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)

    canary, verified = describe_forgotten_facts(world.releases, view_before, pointer)
    assert f"the canary of {B} has ended" in canary
    assert f"{B} was verified: run `load {B}` and `verify {B}`" in verified
    # Nothing was lost, so nothing is named.
    view_before = world.releases.view()
    pointer, _, _ = restore_redis(world.releases, attempt="again", chunk_bytes=1000)
    assert describe_forgotten_facts(world.releases, view_before, pointer) == []


def test_a_pointer_from_an_older_snapshot_is_not_trusted(world):
    """Redis restored from an old snapshot must not take readers or publishers back."""
    world.publish(A)
    old = world.client.get(world.keys.live)
    world.publish(B)
    world.client.set(world.keys.live, old)
    world.load(C)
    with pytest.raises(Conflict, match="older pointer"):
        moves.publish(world.releases, C, attempt=world.attempt())
    pointer, _, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)
    assert pointer.generation == B and pointer.epoch > Pointer.from_bytes(old).epoch


def test_an_older_snapshot_after_a_restore_that_died_unconfirmed_leads_readers_on(world, monkeypatch):
    world.publish(A)
    old = world.client.get(world.keys.live)
    lose_redis(world)

    def die():
        raise ConnectionError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "write_once", keep_intents(world.store.write_once, die))
        with pytest.raises(ConnectionError):
            restore_redis(world.releases, attempt="dead", chunk_bytes=1000)
    unconfirmed_pointer = world.live()
    assert unconfirmed_pointer.epoch > Pointer.from_bytes(old).epoch  # readers may follow it by now
    world.client.set(world.keys.live, old)

    pointer, _, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)

    assert pointer.generation == A and pointer.epoch > unconfirmed_pointer.epoch


@pytest.mark.parametrize("overtaken_method", ["record", "move_pointer"])
def test_a_restore_that_another_overtook_before_redis_was_lost_again_starts_over(world, monkeypatch, overtaken_method):
    """Readers may have followed the other one: nothing that was noted earlier may lead them back."""
    world.publish(A, B)
    pages = world.pages()
    lose_redis(world)
    where = world.releases if overtaken_method == "record" else world.control
    works = getattr(where, overtaken_method)
    overtaken: list[Pointer | None] = []

    def overtake(*arguments, **options):
        release_record = works(*arguments, **options) if overtaken_method == "record" else None
        if not overtaken:
            overtaken.append(None)
            other_pointer, _, _ = restore_redis(world.releases, attempt="other", chunk_bytes=1000)
            overtaken[0] = other_pointer
            if overtaken_method == "record":
                world.client.delete(world.keys.live)  # a snapshot from in between
            else:
                lose_redis(world)
        return release_record or works(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(where, overtaken_method, overtake)
        pointer, _, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)

    other_pointer = overtaken[0]
    assert other_pointer is not None and pointer.epoch > other_pointer.epoch and world.live() == pointer
    assert world.pages() == pages and world.control.rows()[B].state is GenerationState.LIVE


def test_publishing_into_an_emptied_redis_is_refused_until_restored(world):
    world.publish(A)
    world.load(B)
    world.client.delete(world.keys.live)
    with pytest.raises(Conflict, match="restore"):
        moves.publish(world.releases, B, attempt=world.attempt())


def test_a_restore_never_replaces_a_pointer_that_no_record_explains(world):
    world.publish(A)
    unknown = Pointer(B, world.live().epoch + 1, A, "elsewhere", 0.0)
    assert world.control.move_pointer(unknown, expected_epoch=world.live().epoch, row_by_generation={})
    with pytest.raises(Conflict, match="no release record explains"):
        restore_redis(world.releases, attempt="restore", chunk_bytes=1000)
    world.load(C)
    with pytest.raises(Conflict, match="no release record explains"):
        moves.publish(world.releases, C, attempt=world.attempt())
    assert world.live() == unknown


def test_a_roll_back_after_a_restore_lands_on_loaded_pages_only(world):
    world.publish(A, B, C)
    manifest = read_manifest(world.store, A)
    lose_redis(world)
    restore_redis(world.releases, attempt="restore", chunk_bytes=1000)
    assert not pages_of(world, A)

    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    moves.roll_back(world.releases, target_generation=None, reason="bad too", attempt=world.attempt())

    assert world.live().generation == A
    assert pages_of(world, A) == set(page_keys(world.keys, manifest))


def test_a_generation_verified_again_before_redis_was_lost_is_published_with_its_pages(world):
    world.publish(A, B)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    world.releases.mark_verified(B, attempt=world.attempt())
    lose_redis(world)
    restore_redis(world.releases, attempt="restore", chunk_bytes=1000)
    moves.publish(world.releases, B, attempt=world.attempt())
    assert world.live().generation == B and len(pages_of(world, B)) == 10


def test_a_manifest_that_is_not_the_released_one_is_neither_restored_nor_rolled_back_to(world):
    world.publish(A, B)
    path = generation_path(A, "manifest.json")
    released = world.store.read(path)
    assert all_releases(world.store)[0].manifest_sha256 == manifest_digest(released)
    altered_manifest = released.replace(b'"inputs_digest": ""', b'"inputs_digest": "x"')
    assert altered_manifest != released
    world.store.write(path, altered_manifest)
    with pytest.raises(CorruptArtefact, match="release record"):
        moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    _, loaded, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)
    assert loaded == [B]
    world.store.write(path, released)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    world.store.write(path, altered_manifest)
    with pytest.raises(CorruptArtefact, match="release record"):
        restore_redis(world.releases, attempt="restore", chunk_bytes=1000)


@pytest.mark.parametrize("truncated_manifest", [b"", b'{"format": 1,', b"[]"])
def test_of_a_manifest_cut_short_the_error_says_so_and_only_what_needs_it_stops(world, truncated_manifest):
    world.publish(A, B)
    path = generation_path(A, "manifest.json")
    released = world.store.read(path)
    world.store.write(path, truncated_manifest)
    with pytest.raises(CorruptArtefact, match="not a manifest"):
        moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    assert restore_redis(world.releases, attempt="restore", chunk_bytes=1000)[1] == [B]
    world.store.write(path, released)
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    world.store.write(path, truncated_manifest)
    with pytest.raises(CorruptArtefact, match="not a manifest"):
        restore_redis(world.releases, attempt="restore", chunk_bytes=1000)


def test_a_roll_back_in_doubt_is_carried_out_without_naming_what_a_dead_sweep_had_marked(world):
    world.publish(A, B, C)
    epoch = world.live().epoch
    world.releases.record("roll_back", B, attempt="dead", reason="bad", previous_generation=A, expected_epoch=epoch)
    world.control.set_row(A, RegistryRow(GenerationState.RETIRED, world.clock()))

    pointer, loaded, _ = restore_redis(world.releases, attempt="restore", chunk_bytes=1000)

    assert (pointer.generation, pointer.previous, loaded) == (B, None, [B])
    assert world.releases.ledger().state(C) is GenerationState.ROLLED_BACK


def test_a_restore_writes_rows_of_retired_generations_only_while_overlays_of_them_may_live(world):
    world.publish(A, B, C, D)
    retire(world.releases, A, attempt="sweep")
    world.clock.now_s += 1000
    retire(world.releases, B, attempt="sweep")
    lose_redis(world)
    restore_redis(world.releases, attempt="restore", chunk_bytes=1000, overlay_ttl_s=500.0)
    states = {generation: row.state for generation, row in world.control.rows().items()}
    assert states == {B: GenerationState.RETIRED, C: GenerationState.SUPERSEDED, D: GenerationState.LIVE}
