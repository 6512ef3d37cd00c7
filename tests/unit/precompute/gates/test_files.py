"""The gate on files, cut off and tried again: what this host has checked and nobody touched is not read twice."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cache.errors import CorruptArtefact, StoreError
from cache.format.manifest import Artefact
from cache.store.artefacts import ArtefactStore, describe_file, generation_path
from precompute.gates.rules.checksums import CHECKED_NOTES, check_files, run_in_threads

GENERATION = "20260131T000000Z-0123456789ab"


@pytest.fixture
def store(tmp_path: Path) -> ArtefactStore:
    return ArtefactStore(str(tmp_path))


@pytest.fixture
def root(store: ArtefactStore) -> Path:
    folder = store.local(generation_path(GENERATION))
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def artefacts(root: Path) -> Sequence[Artefact]:
    for number in range(20):
        (root / f"{number:02d}.pages").write_bytes(os.urandom(64))
    return [describe_file(root, f"{number:02d}.pages") for number in range(20)]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read whole from now on."""
    names: list[str] = []
    digest = hashlib.file_digest

    def record_file_digest(file, kind):
        names.append(Path(file.name).name)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", record_file_digest)
    return names


def cut_off(store: ArtefactStore, artefacts: Sequence[Artefact], monkeypatch, *, after: int) -> None:
    """A try that a store ends, which no longer answers."""
    with monkeypatch.context() as patched:
        patched.setattr("precompute.gates.rules.checksums.FILES_AT_ONCE", 1)
        fetch = store.fetch
        fetched_paths: list[str] = []

        def fetch_until_outage(path: str) -> Path:
            fetched_paths.append(path)
            if len(fetched_paths) > after:
                raise StoreError("503 Slow Down")
            return fetch(path)

        patched.setattr(store, "fetch", fetch_until_outage)
        with pytest.raises(StoreError):
            check_files(store, GENERATION, artefacts)


def test_another_try_reads_only_what_was_not_read(store, root, artefacts, hashed, monkeypatch):
    cut_off(store, artefacts, monkeypatch, after=12)
    hashed.clear()

    verdict = check_files(store, GENERATION, artefacts)

    assert verdict.passed and verdict.measured_value == 20
    assert sorted(hashed) == [f"{number:02d}.pages" for number in range(12, 20)]


def test_once_all_are_checked_another_verify_reads_all_again(store, root, artefacts, hashed):
    check_files(store, GENERATION, artefacts)
    assert not (root / CHECKED_NOTES).exists()
    hashed.clear()

    check_files(store, GENERATION, artefacts)

    assert len(hashed) == 20


@pytest.mark.parametrize("how", ["written over", "replaced", "of another night"])
def test_what_changed_since_it_was_checked_is_read_again(store, root, artefacts, monkeypatch, how):
    cut_off(store, artefacts, monkeypatch, after=12)
    path = root / "03.pages"
    original_stat = path.stat()
    if how == "written over":  # with its former time of modification
        path.write_bytes(b"?" * 64)
        os.utime(path, ns=(original_stat.st_atime_ns, original_stat.st_mtime_ns))
    elif how == "replaced":
        (root / "beside").write_bytes(b"?" * 64)
        (root / "beside").replace(path)
    else:
        artefacts[3] = Artefact("03.pages", 64, "0" * 64)

    with pytest.raises(CorruptArtefact, match=r"03\.pages has SHA-256"):
        check_files(store, GENERATION, artefacts)


def test_a_line_that_a_killed_try_left_half_is_no_note(store, root, artefacts, hashed, monkeypatch):
    cut_off(store, artefacts, monkeypatch, after=1)
    notes = root / CHECKED_NOTES
    notes.write_text(notes.read_text()[:-9])
    hashed.clear()

    assert check_files(store, GENERATION, artefacts).passed

    assert len(hashed) == 20


def test_notes_may_be_forgotten_by_a_try_that_ran_out_of_time_but_goes_on(store, root, artefacts, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _path: True)  # they are there until the moment they are read

    assert check_files(store, GENERATION, artefacts).passed


def test_the_first_error_ends_the_work_of_all_threads():
    worked_numbers: list[int] = []

    def work(number: int) -> None:
        worked_numbers.append(number)
        if number == 5:
            raise CorruptArtefact("the fifth")

    with pytest.raises(CorruptArtefact, match="the fifth"):
        run_in_threads(work, iter(range(10**9)), 3)

    assert sorted(worked_numbers) == list(range(len(worked_numbers)))
