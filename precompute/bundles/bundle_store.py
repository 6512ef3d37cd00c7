"""Bundles in the artefact store, by digest, and atomic replacement of the folder that a night reads.

bundles/<digest>/...                 the files, never changed
bundles/<unix ms>-<digest>.json      one per handover of a bundle; the last one counts
bundles/<unix ms>-<digest>-<sources>.json   one for each bundle that a night made of tables, by their digest
"""

import glob
import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache.errors import BundleError, ConfigError, StoreError
from cache.store.artefacts import (
    ArtefactStore,
    last_change_time,
    link_or_copy_file,
    open_draft,
    sha256_of,
)
from precompute.bundles.bundle import BUNDLE_FILE, ITEMS_FILE, Bundle
from precompute.bundles.imports import demand_finished_import
from precompute.config.settings import NightConfig

_log = logging.getLogger(__name__)

BUNDLES_KEPT = 3
"""Bundles whose files the store keeps; each generation has a copy of its own."""

COPY_TRIES = 3
"""Attempts to copy the folder, which may be replaced meanwhile."""

COPY_PAUSE_S = 0.5

SWAP_TRIES = 3
"""Attempts at a swap: a night may put the old bundle back meanwhile."""

_RECORD = re.compile(r"(\d{13})-([0-9a-f]{64})\.json")
_FROM_TABLES_RECORD = re.compile(r"(\d{13})-([0-9a-f]{64})-([0-9a-f]{64})\.json")


class BundleHandover(NamedTuple):
    """Record that a bundle became the one that nights use."""

    unix_ms: int
    digest: str

    @property
    def path(self) -> str:
        """Path of the record in the store, which lists the files."""
        return f"bundles/{self.unix_ms:013d}-{self.digest}.json"


class BundleFromTables(NamedTuple):
    """Record that a night made a bundle of tables, which have the digest `sources`."""

    unix_ms: int
    digest: str
    sources: str

    @property
    def path(self) -> str:
        """Path of the record in the store, which lists the files."""
        return f"bundles/{self.unix_ms:013d}-{self.digest}-{self.sources}.json"


def handed_over(store: ArtefactStore) -> list[BundleHandover]:
    """Return the records of all handovers, oldest first."""
    name_matches = map(_RECORD.fullmatch, store.names("bundles"))
    return sorted(
        BundleHandover(int(name_match[1]), name_match[2])
        for name_match in name_matches
        if name_match
    )


def hand_over(
    store: ArtefactStore, bundle: Bundle, *, clock: Callable[[], float] = time.time
) -> BundleHandover:
    """Copy a verified, unchanging bundle into the store, and make it the one that nights use."""
    last = handed_over(store)[-1:]
    if last and last[0].digest == bundle.digest:
        return last[0]
    after = last[0].unix_ms + 1 if last else 0
    new = BundleHandover(max(int(clock() * 1000), after), bundle.digest)
    _put(store, bundle, new)
    return new


def made_of_tables(store: ArtefactStore) -> list[BundleFromTables]:
    """Return the records of all bundles that nights made of tables, oldest first."""
    name_matches = map(_FROM_TABLES_RECORD.fullmatch, store.names("bundles"))
    return sorted(
        BundleFromTables(int(name_match[1]), name_match[2], name_match[3])
        for name_match in name_matches
        if name_match
    )


@contextmanager
def chosen_bundle(config: NightConfig) -> Iterator[Bundle]:
    """Yield a private, verified copy of the bundle for a night, which later trainings do not change.

    The source is the folder `config.bundle`, if its bundle was never handed over before (then it is now), else the last
    one in the store: a host with an older folder than another host's training uses the newer bundle.
    """
    store, source = config.store(), config.path(config.bundle)
    # Hidden, so that nothing that lists the store sees it.
    private_folder = store.local(f".bundle.{secrets.token_hex(4)}.part")
    demand_finished_import(source)
    heal_swap(source)
    try:
        handovers = handed_over(store)
        if (superseding_handover := _superseding(source, handovers)) is not None:
            yield _fetched(store, superseding_handover, private_folder)
        elif source.exists():
            bundle = _copied(source, private_folder)
            if not handovers or bundle.digest != handovers[-1].digest:
                bundle.try_models()  # one that no night can use must not follow one that nights use
            hand_over(store, bundle)
            yield bundle
        else:
            raise ConfigError(
                f"there is no bundle at {source}, nor in {store.url}/bundles: set `bundle`, or run `larder train` first"
            )
    finally:
        shutil.rmtree(private_folder, ignore_errors=True)


@contextmanager
def look_at_chosen(config: NightConfig) -> Iterator[Bundle | None]:
    """Yield the bundle that `chosen_bundle` would yield, None without one; nothing is handed over.

    That of a folder is read without its models.
    """
    store, source = config.store(), config.path(config.bundle)
    demand_finished_import(source)
    superseding_handover = _superseding(source, handed_over(store))
    if superseding_handover is None and not source.exists():
        yield None
        return
    with TemporaryDirectory(prefix="larder-bundle-") as name:
        if superseding_handover is None:
            bundle = Bundle.read(source)
        else:
            bundle = _fetched(store, superseding_handover, Path(name))
        _ = bundle.vocabulary
        yield bundle


def digest_of_chosen(config: NightConfig) -> str | None:
    """Return the digest of the bundle that `chosen_bundle` would yield; None without one, or if a night makes it."""
    if config.sources.item_vectors:
        return None
    source = config.path(config.bundle)
    superseding_handover = _superseding(source, handed_over(config.store()))
    if superseding_handover is not None:
        return superseding_handover.digest
    return sha256_of(source / BUNDLE_FILE) if (source / BUNDLE_FILE).is_file() else None


def chosen_at(config: NightConfig) -> float | None:
    """Return the time at which the current bundle was handed over, Unix seconds; None without one."""
    source = config.path(config.bundle)
    superseding_handover = _superseding(source, handed_over(config.store()))
    if superseding_handover is not None:
        return superseding_handover.unix_ms / 1000
    return (source / BUNDLE_FILE).stat().st_mtime if (source / BUNDLE_FILE).is_file() else None


@contextmanager
def bundle_made_of(
    store: ArtefactStore,
    sources: str,
    make: Callable[[Path], Bundle],
    *,
    clock: Callable[[], float] = time.time,
) -> Iterator[Bundle]:
    """Yield the bundle made of tables with this digest, from the store; else the one that `make` writes into a folder.

    That one is stored, so that a repeated night, on any host, has the same one. It is not handed over: a night that
    takes its bundle from the folder never uses it.
    """
    private_folder = store.local(f".bundle.{secrets.token_hex(4)}.part")
    try:
        table_bundles = [
            table_bundle
            for table_bundle in made_of_tables(store)
            if table_bundle.sources == sources
        ]
        if table_bundles:
            yield _fetched(store, table_bundles[0], private_folder)
        else:
            bundle = make(private_folder)
            _put(store, bundle, BundleFromTables(int(clock() * 1000), bundle.digest, sources))
            yield bundle
    finally:
        shutil.rmtree(private_folder, ignore_errors=True)


def sweep_bundles(store: ArtefactStore) -> int:
    """Remove the files of all bundles but the last few; return the number removed."""
    table_bundles = made_of_tables(store)
    for table_bundle in table_bundles[
        :-BUNDLES_KEPT
    ]:  # the record first: none may promise files that are gone
        store.delete(table_bundle.path)
    recent = {handover.digest for handover in handed_over(store)[-BUNDLES_KEPT:]}
    recent |= {table_bundle.digest for table_bundle in table_bundles[-BUNDLES_KEPT:]}
    stale_digests = [
        entry_name
        for entry_name in store.names("bundles")
        if len(entry_name) == 64 and entry_name not in recent
    ]
    for digest in stale_digests:
        store.delete(f"bundles/{digest}")
    return len(stale_digests)


def forget_items(store: ArtefactStore, raws: Collection[bytes]) -> int:
    """Remove bundles that nights made of tables with one of these items, or that are unreadable; return their number.

    Each generation has its own copy, and a night that needs one of the same tables makes it again, without erased
    items.
    """
    if not raws:
        return 0
    named, table_bundles = (
        pa.array([raw.decode() for raw in raws], pa.string()),
        made_of_tables(store),
    )
    affected_digests = {
        table_bundle.digest
        for table_bundle in table_bundles
        if _may_hold(store, table_bundle.digest, named)
    }
    for table_bundle in table_bundles:
        if (
            table_bundle.digest in affected_digests
        ):  # the record first: none may promise files that are gone
            store.delete(table_bundle.path)
    for digest in affected_digests.difference(handover.digest for handover in handed_over(store)):
        store.delete(f"bundles/{digest}")
    return len(affected_digests)


def _may_hold(store: ArtefactStore, digest: str, named: Any) -> bool:
    """True unless a bundle's list of items can be read, and has none of these (Arrow strings)."""
    try:
        with pa.BufferReader(store.read(_file(digest, ITEMS_FILE)) or b"") as raw:
            item_ids = pq.read_table(raw, columns=["id"]).column("id").cast(named.type)
        return bool(pc.any(pc.is_in(named, value_set=item_ids)).as_py())
    except (pa.ArrowException, KeyError):
        return True


def is_superseded(digest: str | None, handovers: Sequence[BundleHandover]) -> bool:
    """Return True if this bundle was handed over, and another one after it: nights use that one."""
    digests = [handover.digest for handover in handovers]
    return digest in digests[:-1] and digest != digests[-1]


def _superseding(source: Path, handovers: list[BundleHandover]) -> BundleHandover | None:
    """Return the stored bundle that supersedes a folder's; None if the folder's is new, or the newest."""
    digest = sha256_of(source / BUNDLE_FILE) if (source / BUNDLE_FILE).is_file() else None
    if not handovers or (source.exists() and not is_superseded(digest, handovers)):
        return None
    if digest is not None:
        _log.warning(
            "the bundle at %s (%s) was followed by %s, which is used; `larder hand-over %s` goes back to it",
            source, digest[:12], handovers[-1].digest[:12], source,
        )  # fmt: skip
    return handovers[-1]


def _put(store: ArtefactStore, bundle: Bundle, record: BundleHandover | BundleFromTables) -> None:
    """Write the files, then the record, which proves that they are complete."""
    names = sorted(
        file.relative_to(bundle.path).as_posix()
        for file in bundle.path.rglob("*")
        if file.is_file()
    )
    for name in names:
        path = _file(bundle.digest, name)
        with open_draft(store.local(path)) as part_path:
            shutil.copyfile(bundle.path / name, part_path)
        store.put(path)
    _forget_copies(store, bundle.digest)
    record_content = {"name": bundle.name, "version": bundle.version, "files": names}
    store.write_once(record.path, orjson.dumps(record_content))


def _fetched(
    store: ArtefactStore, bundle_record: BundleHandover | BundleFromTables, private_folder: Path
) -> Bundle:
    raw = store.read(bundle_record.path)
    if raw is None:
        raise StoreError(f"{bundle_record.path} is no longer in {store.url}")
    for name in orjson.loads(raw)["files"]:
        link_or_copy_file(store.fetch(_file(bundle_record.digest, name)), private_folder / name)
    _forget_copies(store, bundle_record.digest)
    bundle = Bundle.read(private_folder)
    bundle.verify()
    if bundle.digest != bundle_record.digest:
        raise BundleError(
            f"the bundle {bundle_record.digest} in {store.url} has digest {bundle.digest}"
        )
    return bundle


def _copied(source: Path, private_folder: Path) -> Bundle:
    for remaining_attempts in reversed(range(COPY_TRIES)):
        changed_at = last_change_time(source)
        try:
            shutil.copytree(source, private_folder)
            copy = Bundle.read(private_folder)
            copy.verify()
            return copy
        except (OSError, BundleError) as error:
            shutil.rmtree(private_folder, ignore_errors=True)
            if not remaining_attempts:
                if isinstance(error, BundleError) and last_change_time(source) == changed_at:
                    raise  # nobody is writing it: it is like that
                raise StoreError(f"cannot copy the bundle at {source}: {error}") from error
        time.sleep(
            COPY_PAUSE_S
        )  # replaced while it was copied, perhaps: then another copy is whole
    raise AssertionError("unreachable")


def _file(digest: str, name: str) -> str:
    return f"bundles/{digest}/{name}"


def _forget_copies(store: ArtefactStore, digest: str) -> None:
    """Remove this host's copy of a remote store's bundle: the generation has a copy of its own."""
    if store.folder is None:
        shutil.rmtree(store.local(f"bundles/{digest}"), ignore_errors=True)


def swap_in(new: Path, target: Path) -> None:
    """Replace a folder by renames; on failure restore the old one. After a kill `heal_swap` restores it.

    A night that copies the bundle meanwhile sees the old one or the new one, or copies again.
    """
    for remaining_attempts in reversed(range(SWAP_TRIES)):
        old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
        had_one = target.exists()
        if had_one:
            target.replace(old)
        try:
            new.replace(target)
        except BaseException as error:
            if had_one and old.exists():
                old.replace(target)
            elif remaining_attempts and isinstance(error, OSError) and target.exists():
                continue  # a night that found no bundle has put the old one back: once more
            raise
        break
    for leftover in _swap_leftovers(target, "old"):
        shutil.rmtree(leftover, ignore_errors=True)


def heal_swap(target: Path) -> bool:
    """Restore the bundle that a `train` killed between two renames had moved aside; return whether there was one."""
    if target.exists():
        return False
    for old in _swap_leftovers(target, "old"):
        try:
            old.rename(target)
        except OSError:
            continue
        return True
    return False


def sweep_training(target: Path, *, changed_before_s: float) -> int:
    """Remove leftovers of killed trainings from before that time (Unix seconds); return the number of folders."""
    if not target.exists():
        return 0
    leftovers = [
        leftover
        for kind in ("old", "part")
        for leftover in _swap_leftovers(target, kind)
        if last_change_time(leftover) < changed_before_s
    ]
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    return len(leftovers)


def _swap_leftovers(target: Path, kind: str) -> list[Path]:
    """Return folders of killed swaps, the newest first."""
    dated_folders = [
        (last_change_time(folder), folder)
        for folder in target.parent.glob(f".{glob.escape(target.name)}.????????.{kind}")
    ]
    return [folder for _, folder in sorted(dated_folders, reverse=True)]
