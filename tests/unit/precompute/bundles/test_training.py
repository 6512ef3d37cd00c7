"""The swap of a trained bundle: whole after a kill anywhere, and beside a night that heals it."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from precompute.bundles.bundle_store import heal_swap, swap_in_folder, sweep_training
from precompute.sources.columns import Ids
from precompute.sources.vocabulary import HashedIds, NumberedIds


def bundle(folder: Path, version: str) -> Path:
    """A folder that says which version it is."""
    folder.mkdir(parents=True)
    (folder / "bundle.json").write_text(version)
    return folder


def version_of(folder: Path) -> str:
    return (folder / "bundle.json").read_text()


def test_a_swap_leaves_the_new_bundle_and_nothing_else(tmp_path):
    target = bundle(tmp_path / "bundle", "1")

    swap_in_folder(bundle(tmp_path / ".bundle.0a1b2c3d.part", "2"), target)

    assert version_of(target) == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_kill_between_the_two_renames_is_healed_with_the_old_bundle(tmp_path, monkeypatch):
    target = bundle(tmp_path / "bundle", "1")
    rename = Path.replace
    calls: list[Path] = []

    def killed_at_the_second(self: Path, to: Path) -> Path:
        calls.append(self)
        if len(calls) == 2:
            raise SystemExit
        if len(calls) > 2:
            return self  # a process that is gone puts nothing back
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", killed_at_the_second)
    with pytest.raises(SystemExit):
        swap_in_folder(bundle(tmp_path / ".bundle.0a1b2c3d.part", "2"), target)
    monkeypatch.undo()
    assert not target.exists()

    assert heal_swap(target) and not heal_swap(target)

    assert version_of(target) == "1"


def test_a_night_that_heals_in_the_middle_of_a_swap_does_not_stop_it(tmp_path, monkeypatch):
    target = bundle(tmp_path / "bundle", "1")
    rename = Path.replace
    healed: list[bool] = []

    def healing(self: Path, to: Path) -> Path:
        if self.suffix == ".part" and not healed:
            healed.append(heal_swap(target))
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", healing)
    swap_in_folder(bundle(tmp_path / ".bundle.0a1b2c3d.part", "2"), target)

    assert healed == [True] and version_of(target) == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_killed_trainings_left_goes_only_when_it_is_old_and_a_bundle_stands(tmp_path):
    target = tmp_path / "bundle"
    bundle(tmp_path / ".bundle.0a1b2c3d.part", "half")
    later = time.time() + 60
    assert sweep_training(target, changed_before_s=later) == 0
    bundle(target, "1")

    assert sweep_training(target, changed_before_s=time.time() - 60) == 0
    assert sweep_training(target, changed_before_s=later) == 1
    assert version_of(target) == "1"


def ids_of(texts: list[str]) -> Ids:
    return Ids.of(pa.array(texts, pa.string()))


def test_ids_are_numbered_as_they_come_whatever_the_batches(monkeypatch):
    """As one dictionary over all texts numbers them: which had offsets of 32 bits, so 2 GiB of ids were too many."""
    monkeypatch.setattr("precompute.sources.vocabulary.WAITING_BATCHES_MAX", 3)
    rng = np.random.default_rng(5)
    batches = [[f"item-{number}" for number in rng.integers(0, 40, 30)] for _ in range(10)]
    numbered, hashed_ids = NumberedIds(), HashedIds()
    for batch in batches:
        numbered.add(ids_of(batch))
        hashed_ids.add(ids_of(batch))

    expected_encoding = pc.dictionary_encode(pa.array([text for batch in batches for text in batch]))

    assert numbered.distinct_ids.to_pylist() == expected_encoding.dictionary.to_pylist()
    assert numbered.codes().tolist() == expected_encoding.indices.to_pylist()
    codes, count = hashed_ids.codes()
    pairs = set(zip(codes.tolist(), expected_encoding.indices.to_pylist(), strict=True))
    assert count == len(pairs) == len(expected_encoding.dictionary)
    assert set(codes.tolist()) == set(range(count))


def test_no_step_of_the_training_holds_the_texts_of_all_rows():
    """Two billion bytes of user ids ended a training as an internal error; a row costs 12 bytes now."""
    allocated_before_bytes = pa.total_allocated_bytes()
    users, items = HashedIds(), NumberedIds()
    for number in range(100):
        texts = [f"{'user' * 50}-{number}-{row % 100}" for row in range(1_000)]
        users.add(ids_of(texts))
        items.add(ids_of([f"{'item' * 50}-{row % 100}" for row in range(1_000)]))
    items.codes()
    assert pa.total_allocated_bytes() - allocated_before_bytes < 2 << 20  # of 40 MB
