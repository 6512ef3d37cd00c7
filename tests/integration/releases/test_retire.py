"""What nobody needs is found and removed, and nothing else."""

from collections.abc import Iterator

import pytest

from cache.control.control_keys import RegistryRow
from cache.control.states import GenerationState
from cache.errors import Conflict
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.store.releases import Pointer, all_releases
from precompute.bulk.load import parts_of
from precompute.config.settings import peak_generation_count
from precompute.releases import moves
from precompute.releases.sweep import (
    drop_old_rows,
    has_pages_again,
    note_loaded,
    retire,
    unlink_if_retired,
    unneeded_generations,
)
from tests.integration.release_world import A, B, C, D, World, pages_of
from tests.integration.releases.test_restore import Paced


@pytest.fixture
def world(tmp_path, redis_url, keyspace) -> Iterator[World]:
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


def test_retiring_removes_every_key_and_file_and_nothing_else(world):
    """Keys come from the manifest, in small batches; a swept generation leaves nothing."""
    world.publish(A, B, C, D)
    world.clock.now_s += 100
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == [A, B]

    for generation in (A, B):
        retire(world.releases, generation, attempt=world.attempt())

    assert {key.split(":")[4] for key in world.pages()} == {C, D}
    assert world.store.names("generations") == [C, D]
    assert world.control.rows()[A].state is GenerationState.RETIRED
    world.clock.now_s += 90_000  # no overlay lives any more, but somebody may be bringing pages back
    assert drop_old_rows(world.releases, overlay_ttl_s=86_400) == 0
    world.clock.now_s += 90_000
    assert drop_old_rows(world.releases, overlay_ttl_s=86_400) == 2
    assert set(world.control.rows()) == {C, D}


def test_a_loader_that_comes_late_to_its_retirement_takes_its_pages_away_again(world):
    """Found by a random life: Redis was wiped in between, so whoever retired it saw no page to remove."""
    world.publish(A, B, C, D)
    manifest = read_manifest(world.store, A)
    world.clock.now_s += 100
    retire(world.releases, A, attempt=world.attempt())
    for part in parts_of(manifest):
        world.client.set(part.page_key(world.keys, A, 0), b"page")
        world.client.hset(world.keys.loaded_parts(A), part.loaded_field, part.loaded_digest.decode())

    with pytest.raises(Conflict, match="retired while it was being made"):
        note_loaded(world.releases, A)

    assert not world.client.keys(f"larder:1:{world.keys.namespace}:g:{A}*")


def test_deleting_pages_that_came_back_is_paced_for_the_readers(world):
    world.publish(A, B, C, D)
    manifest = read_manifest(world.store, A)
    world.clock.now_s += 100
    retire(world.releases, A, attempt=world.attempt())
    for part in parts_of(manifest):
        world.client.set(part.page_key(world.keys, A, 0), b"page")
    governor = Paced()

    unlink_if_retired(world.releases, A, governor=governor)

    assert governor.paced >= len(parts_of(manifest)) * governor.piece_bytes
    assert not world.client.keys(f"larder:1:{world.keys.namespace}:g:{A}*")


def test_marks_alone_say_that_a_retired_generation_is_back(world):
    world.publish(A, B, C, D)
    world.clock.now_s += 100
    retire(world.releases, A, attempt=world.attempt())
    history = world.releases.view().history
    assert not has_pages_again(world.releases, A, history)

    world.client.hset(world.keys.loaded_parts(A), "user_topk/0", "mark")

    assert has_pages_again(world.releases, A, history)


def test_a_roll_back_names_no_previous_that_was_retired_while_it_looked(world, monkeypatch):
    """Found by a random life: Redis had forgotten the retirement, the release records had not."""
    world.publish(A, B, C)
    world.clock.now_s += 100
    record = world.releases.record

    def retire_first(action, generation, **entry):
        if action == "roll_back":
            monkeypatch.undo()
            row = world.control.rows()[A]
            retire(world.releases, A, attempt=world.attempt())
            world.control.set_row(A, row)
        return record(action, generation, **entry)

    monkeypatch.setattr(world.releases, "record", retire_first)
    with pytest.raises(Conflict, match=f"{A} was retired meanwhile"):
        moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())

    moved = moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    assert (moved.pointer.generation, moved.pointer.previous) == (B, None)


def test_retire_spares_what_is_held_pinned_or_just_superseded(world):
    world.publish(A, B, C, D)
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == [A, B]
    world.releases.pin(A, reason="audit", expires_at=None, attempt=world.attempt())
    beat = b'{"replica":"r1","serving":"%s","holds":["%s"]}' % (D.encode(), B.encode())
    world.client.zadd(world.keys.replicas, {beat: world.clock()})
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == []
    world.clock.now_s += 4
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == [B]
    assert unneeded_generations(world.releases, kept_generations=0, grace_s=4 * 86_400) == []


def test_a_retirement_cut_short_is_finished_and_never_rolled_back_to(world, monkeypatch):
    world.publish(A, B, C)
    world.clock.now_s += 100

    def crash(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("precompute.releases.sweep.unlink_pages", crash)
        with pytest.raises(KeyboardInterrupt):
            retire(world.releases, A, attempt=world.attempt())
    with pytest.raises(Conflict, match="retired"):
        moves.roll_back(world.releases, target_generation=A, reason="", attempt=world.attempt())
    assert unneeded_generations(world.releases, kept_generations=5, grace_s=60) == [A]
    retire(world.releases, A, attempt=world.attempt())
    assert world.store.names("generations") == [B, C]


def test_rows_change_only_under_the_pointer_that_the_writer_saw(world):
    world.publish(A, B, C)
    world.control.set_row(A, RegistryRow(GenerationState.RETIRED, 0.0))
    rows = {generation: RegistryRow(GenerationState.REFUSED, 0.0) for generation in (A, B)}
    epoch = world.live().epoch

    assert not world.control.write_rows(rows, expected_epoch=epoch - 1)
    assert not world.control.write_rows(rows, expected_epoch=0)
    with pytest.raises(Conflict):
        world.control.write_rows(rows, expected_epoch=epoch, unless_named_as="previous")
    with pytest.raises(Conflict):
        world.control.write_rows({C: rows[A]}, expected_epoch=epoch, unless_named_as="live")
    assert world.control.rows()[B].state is GenerationState.SUPERSEDED
    assert world.control.write_rows(rows, expected_epoch=epoch, unless_named_as="live")
    rows_after = world.control.rows()
    assert (rows_after[A].state, rows_after[B].state) == (GenerationState.RETIRED, GenerationState.REFUSED)


def test_a_pointer_never_names_a_retired_generation_as_previous(world):
    world.publish(A, B)
    world.control.set_row(A, RegistryRow(GenerationState.RETIRED, 0.0))
    epoch = world.live().epoch
    to = Pointer(C, epoch + 1, A, "x", 0.0)
    assert world.control.move_pointer(to, expected_epoch=epoch, row_by_generation={}) is None
    world.publish(C)
    assert world.live().previous == B
    moves.roll_back(world.releases, target_generation=None, reason="bad", attempt=world.attempt())
    assert (world.live().generation, world.live().previous) == (B, None)


def test_what_is_being_retired_cannot_be_pinned(world):
    world.publish(A, B, C)
    world.control.set_row(A, RegistryRow(GenerationState.RETIRED, world.clock()))
    with pytest.raises(Conflict, match="being retired"):
        world.releases.pin(A, reason="audit", expires_at=None, attempt=world.attempt())
    assert not world.releases.ledger().is_pinned(A, world.clock())


@pytest.mark.parametrize("state", [GenerationState.BEGUN, GenerationState.LOADED, GenerationState.VERIFIED])
def test_an_unfinished_night_is_abandoned_and_removed_once_it_is_old_news(world, state):
    """Nothing is left behind for ever."""
    world.load(A)
    world.control.set_row(A, RegistryRow(state, world.clock()))
    world.load(D)
    world.control.set_row(D, RegistryRow(state, world.clock()))
    world.publish(B)
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == []
    world.clock.now_s += 1
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60, abandon_after_s=90_000) == []
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == [A]

    retire(world.releases, A, attempt="sweep")

    actions = [release.action for release in all_releases(world.store) if release.generation == A]
    assert actions == ["abandon", "retire"]
    assert world.store.names("generations") == [B, D] and not pages_of(world, A)
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == []
    with pytest.raises(Conflict):
        retire(world.releases, D, attempt="sweep")


def test_a_folder_that_no_row_knows_is_swept_by_its_age(world):
    world.make(A)
    unfinished = "20260101T000000Z-aaaaaaaaaaaa"
    world.store.write(generation_path(unfinished, "items/ids.bin"), b"x")
    world.store.write("generations/notes.txt", b"x")
    world.publish(B)
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == [A]
    world.clock.now_s += 90_000
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == [A, unfinished]
    for generation in (A, unfinished):
        retire(world.releases, generation, attempt="sweep")
    assert world.store.names("generations") == [B, "notes.txt"]


@pytest.mark.parametrize("state", [GenerationState.BEGUN, GenerationState.LOADED, GenerationState.VERIFIED])
def test_an_unpublished_night_goes_at_once_when_a_newer_one_is_made(world, state):
    """Its pages would take the room of the newer one, and of each one after it."""
    world.publish(A)
    for generation in (B, C, D):
        world.load(generation)
        world.control.set_row(generation, RegistryRow(state, world.clock()))
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == []
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60, generation_being_made=C) == [B]
    with pytest.raises(Conflict):
        retire(world.releases, B, attempt="sweep")

    retire(world.releases, B, attempt="sweep", generation_being_made=C)

    assert world.store.names("generations") == [A, C, D] and not pages_of(world, B)
    assert world.releases.state(B) is GenerationState.RETIRED


def test_a_refused_night_that_is_made_again_is_not_swept_from_under_itself(world):
    world.publish(A)
    world.load(B)
    moves.refuse(world.releases, B, reason="bad", attempt=world.attempt())

    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60, generation_being_made=B) == []
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60, generation_being_made=C) == [B]


@pytest.mark.parametrize(("keep", "swept"), [(0, [A, B]), (1, [A, B]), (2, [A])])
def test_a_sweep_leaves_as_many_superseded_generations_as_the_plan_counts(world, keep, swept):
    world.publish(A, B, C, D)
    world.clock.now_s += 100

    assert unneeded_generations(world.releases, kept_generations=keep, grace_s=60) == swept
    assert 4 - len(swept) + 2 == peak_generation_count(keep)


def test_a_held_or_pinned_unfinished_night_stays(world):
    world.load(A)
    world.publish(B)
    world.clock.now_s += 90_000
    world.releases.pin(A, reason="audit", expires_at=None, attempt=world.attempt())
    assert unneeded_generations(world.releases, kept_generations=1, grace_s=60) == []
    with pytest.raises(Conflict, match="pinned"):
        retire(world.releases, A, attempt="sweep")
