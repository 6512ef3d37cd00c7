"""The gate on files: several at once, and another try on the same host goes on where the last one stopped."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from cache.format.manifest_files import Artefact
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path
from precompute.gates.evidence.verdict import Measurement

T = TypeVar("T")

AT_ONCE: Final = 8
NOTES: Final = "work/files.checked"


def files(store: ArtefactStore, generation: str, artefacts: Sequence[Artefact]) -> Measurement:
    """Every file of the generation against its checksum; raises CorruptArtefact naming one that differs."""
    checked = CheckedFiles(store.local(generation_path(generation, NOTES)))

    def check(artefact: Artefact) -> None:
        path = store.local(generation_path(generation, artefact.path))
        stamp_before = stamp(path, artefact)
        if stamp_before is not None and stamp_before in checked:
            return
        fetch_checked(store, generation, artefact)
        if (after := stamp(path, artefact)) is not None and stamp_before in (None, after):
            checked.add(after)

    in_threads(check, artefacts, AT_ONCE)
    checked.forget()
    return Measurement(True, len(artefacts), len(artefacts), "files whose checksum matched")


def stamp(path: Path, artefact: Artefact) -> str | None:
    """Stamp of a file when it was checked: whatever writes to the file changes it. None for one that is not there."""
    try:
        file_stat = path.stat()
    except FileNotFoundError:
        return None
    stat_values = (
        file_stat.st_ino,
        file_stat.st_size,
        file_stat.st_mtime_ns,
        file_stat.st_ctime_ns,
    )
    return " ".join((artefact.path, artefact.sha256, *map(str, stat_values)))


class CheckedFiles:
    """Stamps of the files that this host has found as the manifest says, for the next try if this one is cut off."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock, self._stamps = path, threading.Lock(), set[str]()
        # A gate that ran out of time goes on in its thread, and may forget the stamps at any moment.
        with contextlib.suppress(FileNotFoundError):
            self._stamps.update(path.read_text().splitlines())

    def __contains__(self, stamped: str) -> bool:
        return stamped in self._stamps

    def add(self, stamped: str) -> None:
        """Adds a stamp, kept at once: who is killed later loses nothing of it."""
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as notes:
                notes.write(f"{stamped}\n")

    def forget(self) -> None:
        """Removes all stamps when all files are checked: what is verified again later is checked again."""
        self._path.unlink(missing_ok=True)


def in_threads(work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """`work` on every item; the first error ends it and is raised.

    In daemons, not a pool: the program's exit would wait for a pool's threads, and so for a store that hangs.
    """
    todo, lock, errors = iter(items), threading.Lock(), list[Exception]()

    def run() -> None:
        while not errors:
            with lock:
                item = next(todo, None)
            if item is None:
                return
            try:
                work(item)
            except Exception as error:
                errors.append(error)

    started = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
