"""The swap of a trained bundle: whole after a kill anywhere, and beside a night that heals it."""

import time
from pathlib import Path

import pytest

from precompute.models import training
from precompute.models.training import heal, sweep_training


def bundle(folder: Path, version: str) -> Path:
    """A folder that says which version it is."""
    folder.mkdir(parents=True)
    (folder / "bundle.json").write_text(version)
    return folder


def version_of(folder: Path) -> str:
    return (folder / "bundle.json").read_text()


def test_a_swap_leaves_the_new_bundle_and_nothing_beside_it(tmp_path):
    target = bundle(tmp_path / "bundle", "1")

    training._put_in_place(bundle(tmp_path / ".bundle.0a1b2c3d.part", "2"), target)

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
        training._put_in_place(bundle(tmp_path / ".bundle.0a1b2c3d.part", "2"), target)
    monkeypatch.undo()
    assert not target.exists()

    assert heal(target) and not heal(target)

    assert version_of(target) == "1"


def test_a_night_that_heals_in_the_middle_of_a_swap_does_not_stop_it(tmp_path, monkeypatch):
    target = bundle(tmp_path / "bundle", "1")
    rename = Path.replace
    healed: list[bool] = []

    def healing(self: Path, to: Path) -> Path:
        if self.suffix == ".part" and not healed:
            healed.append(heal(target))
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", healing)
    training._put_in_place(bundle(tmp_path / ".bundle.0a1b2c3d.part", "2"), target)

    assert healed == [True] and version_of(target) == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_killed_trainings_left_goes_only_when_it_is_old_and_a_bundle_stands(tmp_path):
    target = tmp_path / "bundle"
    bundle(tmp_path / ".bundle.0a1b2c3d.part", "half")
    later = time.time() + 60
    assert sweep_training(target, before=later) == 0
    bundle(target, "1")

    assert sweep_training(target, before=time.time() - 60) == 0
    assert sweep_training(target, before=later) == 1
    assert version_of(target) == "1"
