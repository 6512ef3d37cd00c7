"""Gates on bytes: checksums of the generation's files, and of the pages in Redis."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TypeVar

import redis

from cache.errors import NotJudged
from cache.format.manifest import Artefact
from cache.l2.sync_clients import primary_clients
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path
from precompute.bulk.governor import Governor, open_governor
from precompute.bulk.load import Part, load_part, parts_of, total_pages
from precompute.bulk.readback import BadPage, verify_part
from precompute.gates.evidence.candidate import Candidate, Measurement, integrity

T = TypeVar("T")

FILES_AT_ONCE: Final = 8
"""Number of files checked in parallel."""

CHECKED_NOTES: Final = "work/files.checked"
"""File on this host with stamps of the files that it has checked."""

CHUNK_BYTES: Final = 1 << 20
"""Bytes of pages that are sent or read back at once while Redis has no readers."""


def check_files(store: ArtefactStore, generation: str, artefacts: Sequence[Artefact]) -> Measurement:
    """Check every file of the generation against its checksum; raise CorruptArtefact naming one that differs."""
    checked_files = CheckedFiles(store.local(generation_path(generation, CHECKED_NOTES)))

    def check(artefact: Artefact) -> None:
        path = store.local(generation_path(generation, artefact.path))
        stamp_before = file_stamp(path, artefact)
        if stamp_before is not None and stamp_before in checked_files:
            return
        fetch_checked(store, generation, artefact)
        if (after := file_stamp(path, artefact)) is not None and stamp_before in (None, after):
            checked_files.add(after)

    run_in_threads(check, artefacts, FILES_AT_ONCE)
    checked_files.forget()
    return Measurement(True, len(artefacts), len(artefacts), "files whose checksum matched")


class CheckedFiles:
    """Stamps of the files that this host has found correct, for the next attempt if this one is interrupted."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock, self._stamps = path, threading.Lock(), set[str]()
        # A gate that timed out goes on in its thread, and may remove the stamps at any moment.
        with contextlib.suppress(FileNotFoundError):
            self._stamps.update(path.read_text().splitlines())

    def __contains__(self, stamp: str) -> bool:
        return stamp in self._stamps

    def add(self, stamp: str) -> None:
        """Add a stamp and write it at once, so that a killed process loses none."""
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as stamp_file:
                stamp_file.write(f"{stamp}\n")

    def forget(self) -> None:
        """Remove all stamps after all files are checked: a later verification checks them again."""
        self._path.unlink(missing_ok=True)


def file_stamp(path: Path, artefact: Artefact) -> str | None:
    """Return a stamp of a file that changes with every write to the file; None for a missing file."""
    try:
        file_stat = path.stat()
    except FileNotFoundError:
        return None
    stat_values = (file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns)
    return " ".join((artefact.path, artefact.sha256, *map(str, stat_values)))


def run_in_threads(run_task: Callable[[T], None], tasks: Iterable[T], thread_count: int) -> None:
    """Call `work` on every item in parallel; the first error ends the work and is raised.

    The threads are daemons, not a pool's: at exit the program would wait for a pool's threads, and so for a store that
    hangs.
    """
    pending_items, lock, errors = iter(tasks), threading.Lock(), list[Exception]()

    def run() -> None:
        while not errors:
            with lock:
                task = next(pending_items, None)
            if task is None:
                return
            try:
                run_task(task)
            except Exception as error:
                errors.append(error)

    worker_threads = [threading.Thread(target=run, daemon=True) for _ in range(thread_count)]
    for thread in worker_threads:
        thread.start()
    for thread in worker_threads:
        thread.join()
    if errors:
        raise errors[0]


@integrity("pages_in_redis")
def pages_in_redis(candidate: Candidate) -> Measurement:
    """Check every page, read back from Redis, against its checksum; reload a part that Redis lost.

    Progress is noted in Redis, part by part, so that another attempt continues from there. A note is void after a
    restart of the server, and a writer of the part removes it.
    """
    control, manifest = candidate.control, candidate.manifest
    notes_key, parts = control.keyspace.loaded_parts(manifest.generation), parts_of(manifest)
    run_ids = _read_run_ids(control.client)
    note_by_part: Any = control.client.hgetall(notes_key)
    reload_count = 0
    governor_context = candidate.governor and open_governor(candidate.governor, control)
    with governor_context or nullcontext() as governor:
        for part in parts:
            note = b" ".join((part.loaded_digest, run_ids))
            if note_by_part.get(part.read_back_field.encode()) == note:
                continue
            reload_count += _verify_or_reload(candidate, part, governor)
            with suppress(redis.exceptions.OutOfMemoryError):  # without the note only the next attempt takes longer
                control.client.hset(notes_key, part.read_back_field, note.decode())
    page_count = total_pages(manifest)
    control.client.hdel(notes_key, *(part.read_back_field for part in parts))
    reload_text = f"pages whose checksum matched, {reload_count} parts of them loaded once more" if reload_count else ""
    return Measurement(True, page_count, page_count, reload_text or "pages whose checksum matched")


def _verify_or_reload(candidate: Candidate, part: Part, governor: Governor | None) -> bool:
    """Return whether the part had to be reloaded; raise NotJudged if it is wrong even then."""
    part_arguments = (
        candidate.control.client, candidate.control.keyspace, candidate.manifest, candidate.root, part,
    )  # fmt: skip
    try:
        verify_part(*part_arguments, chunk_bytes=CHUNK_BYTES, governor=governor)
        return False
    except BadPage:
        # The generation's files are correct: Redis lost or changed the pages that it was sent.
        load_part(*part_arguments, chunk_bytes=CHUNK_BYTES, governor=governor)
    try:
        verify_part(*part_arguments, chunk_bytes=CHUNK_BYTES, governor=governor)
    except BadPage as error:
        raise NotJudged(
            f"Redis does not hold the pages that it was sent: loaded again, {error.message}", rule="pages_in_redis"
        ) from error
    return True


def _read_run_ids(client: "redis.Redis") -> bytes:
    """Return the run ids of all masters: a restarted or replaced server may lack the pages that were read back."""
    server_infos: list[Any] = [server.info("server") for server in primary_clients(client).values()]
    # A server without a run id may have restarted at any time.
    return ",".join(sorted(str(server_info.get("run_id") or token_hex()) for server_info in server_infos)).encode()
