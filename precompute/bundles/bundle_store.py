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
from cache.store.artefacts import ArtefactStore, disk_errors, last_change_time, link_or_copy_file, open_draft, sha256_of
from precompute.bundles.bundle import BUNDLE_FILE, ITEMS_FILE, Bundle
from precompute.bundles.imports import demand_finished_import
from precompute.config.settings import NightConfig

_log = logging.getLogger(__name__)

KEPT_BUNDLES_MAX = 3
"""Number of bundles whose files the store keeps; each generation has its own copy."""

COPY_TRIES_MAX = 3
"""Attempts to copy the folder, which may be replaced during a copy."""

COPY_PAUSE_S = 0.5

SWAP_TRIES_MAX = 3
"""Attempts at a swap, during which a night may restore the old bundle."""

_HANDOVER_NAME_PATTERN = re.compile(r"(\d{13})-([0-9a-f]{64})\.json")
_FROM_TABLES_NAME_PATTERN = re.compile(r"(\d{13})-([0-9a-f]{64})-([0-9a-f]{64})\.json")


class BundleHandover(NamedTuple):
    """Record that from a time on nights use a bundle."""

    unix_ms: int
    bundle_digest: str

    @property
    def path(self) -> str:
        """Path of the record in the store, which lists the files."""
        return f"bundles/{self.unix_ms:013d}-{self.bundle_digest}.json"


class BundleFromTables(NamedTuple):
    """Record that a night made a bundle from tables with the digest `sources_digest`."""

    unix_ms: int
    bundle_digest: str
    sources_digest: str

    @property
    def path(self) -> str:
        """Path of the record in the store, which lists the files."""
        return f"bundles/{self.unix_ms:013d}-{self.bundle_digest}-{self.sources_digest}.json"


def all_handovers(store: ArtefactStore) -> list[BundleHandover]:
    """Return the records of all handovers, oldest first."""
    name_matches = map(_HANDOVER_NAME_PATTERN.fullmatch, store.names("bundles"))
    return sorted(BundleHandover(int(name_match[1]), name_match[2]) for name_match in name_matches if name_match)


def hand_over(store: ArtefactStore, bundle: Bundle, *, clock: Callable[[], float] = time.time) -> BundleHandover:
    """Copy a verified, unchanging bundle into the store, and make nights use it."""
    last_handover = all_handovers(store)[-1:]
    if last_handover and last_handover[0].bundle_digest == bundle.digest:
        return last_handover[0]
    unix_ms_min = last_handover[0].unix_ms + 1 if last_handover else 0
    new_handover = BundleHandover(max(int(clock() * 1000), unix_ms_min), bundle.digest)
    _store_bundle(store, bundle, new_handover)
    return new_handover


def bundles_from_tables(store: ArtefactStore) -> list[BundleFromTables]:
    """Return the records of all bundles that nights made from tables, oldest first."""
    name_matches = map(_FROM_TABLES_NAME_PATTERN.fullmatch, store.names("bundles"))
    return sorted(
        BundleFromTables(int(name_match[1]), name_match[2], name_match[3]) for name_match in name_matches if name_match
    )


@contextmanager
def chosen_bundle(config: NightConfig) -> Iterator[Bundle]:
    """Yield a private, verified copy of the bundle for a night, which later trainings do not change.

    The source is the folder `config.bundle` if its bundle was not handed over before (this call hands it over), else
    the last bundle in the store: a host whose folder is older than another host's training uses the newer bundle.
    """
    store, bundle_folder = config.store(), config.path(config.bundle)
    # The name is hidden, so that listings of the store leave it out.
    private_folder = store.local(f".bundle.{secrets.token_hex(4)}.part")
    demand_finished_import(bundle_folder)
    heal_swap(bundle_folder)
    try:
        handovers = all_handovers(store)
        if (superseding_handover := _superseding_handover(bundle_folder, handovers)) is not None:
            yield _fetch_bundle(store, superseding_handover, private_folder)
        elif bundle_folder.exists():
            bundle = _copy_bundle(bundle_folder, private_folder)
            if not handovers or bundle.digest != handovers[-1].bundle_digest:
                bundle.try_models()  # an unusable bundle must not replace a usable one
            hand_over(store, bundle)
            yield bundle
        else:
            raise ConfigError(
                f"there is no bundle at {bundle_folder}, nor in {store.url}/bundles: set `bundle`, or run `larder "
                "train` first"
            )
    finally:
        shutil.rmtree(private_folder, ignore_errors=True)


@contextmanager
def preview_chosen_bundle(config: NightConfig) -> Iterator[Bundle | None]:
    """Yield the bundle that `chosen_bundle` would yield, None without one; nothing is handed over.

    A bundle in a folder is read without its models.
    """
    store, bundle_folder = config.store(), config.path(config.bundle)
    demand_finished_import(bundle_folder)
    superseding_handover = _superseding_handover(bundle_folder, all_handovers(store))
    if superseding_handover is None and not bundle_folder.exists():
        yield None
        return
    with TemporaryDirectory(prefix="larder-bundle-") as temporary_folder:
        if superseding_handover is None:
            bundle = Bundle.read(bundle_folder)
        else:
            bundle = _fetch_bundle(store, superseding_handover, Path(temporary_folder))
        _ = bundle.vocabulary
        yield bundle


def chosen_bundle_digest(config: NightConfig) -> str | None:
    """Return the digest of the bundle that `chosen_bundle` would yield; None without one, or if a night makes it."""
    if config.sources.item_vectors:
        return None
    bundle_folder = config.path(config.bundle)
    superseding_handover = _superseding_handover(bundle_folder, all_handovers(config.store()))
    if superseding_handover is not None:
        return superseding_handover.bundle_digest
    return sha256_of(bundle_folder / BUNDLE_FILE) if (bundle_folder / BUNDLE_FILE).is_file() else None


def chosen_bundle_handed_over_at(config: NightConfig) -> float | None:
    """Return the time at which the current bundle was handed over, Unix seconds; None without one."""
    bundle_folder = config.path(config.bundle)
    superseding_handover = _superseding_handover(bundle_folder, all_handovers(config.store()))
    if superseding_handover is not None:
        return superseding_handover.unix_ms / 1000
    return (bundle_folder / BUNDLE_FILE).stat().st_mtime if (bundle_folder / BUNDLE_FILE).is_file() else None


@contextmanager
def bundle_made_of(
    store: ArtefactStore,
    sources_digest: str,
    make_bundle: Callable[[Path], Bundle],
    *,
    clock: Callable[[], float] = time.time,
) -> Iterator[Bundle]:
    """Yield the stored bundle made from tables with this digest; else make one with `make_bundle`, and store it.

    Storing it makes a repeated night on any host use the same bundle. It is not handed over, so a night that takes its
    bundle from the folder never uses it.
    """
    private_folder = store.local(f".bundle.{secrets.token_hex(4)}.part")
    try:
        table_bundles = [
            table_bundle for table_bundle in bundles_from_tables(store) if table_bundle.sources_digest == sources_digest
        ]
        if table_bundles:
            yield _fetch_bundle(store, table_bundles[0], private_folder)
        else:
            bundle = make_bundle(private_folder)
            _store_bundle(store, bundle, BundleFromTables(int(clock() * 1000), bundle.digest, sources_digest))
            yield bundle
    finally:
        shutil.rmtree(private_folder, ignore_errors=True)


def sweep_bundles(store: ArtefactStore) -> int:
    """Remove the files of all bundles but the last few; return the number removed."""
    table_bundles = bundles_from_tables(store)
    # the record goes first: no record may list files that are removed
    for table_bundle in table_bundles[:-KEPT_BUNDLES_MAX]:
        store.delete(table_bundle.path)
    recent_digests = {handover.bundle_digest for handover in all_handovers(store)[-KEPT_BUNDLES_MAX:]}
    recent_digests |= {table_bundle.bundle_digest for table_bundle in table_bundles[-KEPT_BUNDLES_MAX:]}
    stale_digests = [
        entry_name
        for entry_name in store.names("bundles")
        if len(entry_name) == 64 and entry_name not in recent_digests
    ]
    for digest in stale_digests:
        store.delete(f"bundles/{digest}")
    return len(stale_digests)


def remove_bundles_with_items(store: ArtefactStore, raw_items: Collection[bytes]) -> int:
    """Remove bundles that nights made from tables with one of these items, or that are unreadable; return their number.

    Each generation has its own copy, and a night that needs a bundle of the same tables makes it again, without erased
    items.
    """
    if not raw_items:
        return 0
    item_texts, table_bundles = (
        pa.array([raw_item.decode() for raw_item in raw_items], pa.string()),
        bundles_from_tables(store),
    )
    affected_digests = {
        table_bundle.bundle_digest
        for table_bundle in table_bundles
        if _may_hold_items(store, table_bundle.bundle_digest, item_texts)
    }
    for table_bundle in table_bundles:
        if (
            table_bundle.bundle_digest in affected_digests
        ):  # the record goes first: no record may list files that are removed
            store.delete(table_bundle.path)
    for digest in affected_digests.difference(handover.bundle_digest for handover in all_handovers(store)):
        store.delete(f"bundles/{digest}")
    return len(affected_digests)


def _may_hold_items(store: ArtefactStore, bundle_digest: str, item_texts: Any) -> bool:
    """True if a bundle's list of items has one of these (Arrow strings), or cannot be read."""
    try:
        with pa.BufferReader(store.read(_stored_file_path(bundle_digest, ITEMS_FILE)) or b"") as items_file:
            item_ids = pq.read_table(items_file, columns=["id"]).column("id").cast(item_texts.type)
        return bool(pc.any(pc.is_in(item_texts, value_set=item_ids)).as_py())
    except (pa.ArrowException, KeyError):
        return True


def is_superseded(bundle_digest: str | None, handovers: Sequence[BundleHandover]) -> bool:
    """Return True if this bundle was handed over, and another one later, which nights use."""
    digests = [handover.bundle_digest for handover in handovers]
    return bundle_digest in digests[:-1] and bundle_digest != digests[-1]


def _superseding_handover(bundle_folder: Path, handovers: list[BundleHandover]) -> BundleHandover | None:
    """Return the handover that supersedes a folder's bundle; None if the folder's bundle is new, or the last one."""
    folder_digest = sha256_of(bundle_folder / BUNDLE_FILE) if (bundle_folder / BUNDLE_FILE).is_file() else None
    if not handovers or (bundle_folder.exists() and not is_superseded(folder_digest, handovers)):
        return None
    if folder_digest is not None:
        _log.warning(
            "the bundle at %s (%s) was superseded by %s, which is used; `larder hand-over %s` makes nights use the "
            "former again",
            bundle_folder, folder_digest[:12], handovers[-1].bundle_digest[:12], bundle_folder,
        )  # fmt: skip
    return handovers[-1]


def _store_bundle(store: ArtefactStore, bundle: Bundle, record: BundleHandover | BundleFromTables) -> None:
    """Write the files, then the record, which proves that they are complete."""
    file_names = sorted(
        bundle_file.relative_to(bundle.path).as_posix()
        for bundle_file in bundle.path.rglob("*")
        if bundle_file.is_file()
    )
    for file_name in file_names:
        stored_path = _stored_file_path(bundle.digest, file_name)
        with open_draft(store.local(stored_path)) as part_path:
            shutil.copyfile(bundle.path / file_name, part_path)
        store.put(stored_path)
    _remove_host_copies(store, bundle.digest)
    record_content = {"name": bundle.name, "version": bundle.version, "files": file_names}
    store.write_once(record.path, orjson.dumps(record_content))


def _fetch_bundle(
    store: ArtefactStore, bundle_record: BundleHandover | BundleFromTables, private_folder: Path
) -> Bundle:
    record_bytes = store.read(bundle_record.path)
    if record_bytes is None:
        raise StoreError(f"{bundle_record.path} is no longer in {store.url}")
    for file_name in orjson.loads(record_bytes)["files"]:
        stored_path = _stored_file_path(bundle_record.bundle_digest, file_name)
        try:
            link_or_copy_file(store.fetch(stored_path), private_folder / file_name)
        except FileNotFoundError as error:
            raise StoreError(
                f"{stored_path} is no longer in {store.url}: put it back from a copy of the store, or run `larder "
                "train`, or `larder hand-over FOLDER` for the folder of the bundle"
            ) from error
    _remove_host_copies(store, bundle_record.bundle_digest)
    bundle = Bundle.read(private_folder)
    bundle.verify()
    if bundle.digest != bundle_record.bundle_digest:
        raise BundleError(f"the bundle {bundle_record.bundle_digest} in {store.url} has digest {bundle.digest}")
    return bundle


def _copy_bundle(bundle_folder: Path, private_folder: Path) -> Bundle:
    for remaining_attempts in reversed(range(COPY_TRIES_MAX)):
        changed_at = last_change_time(bundle_folder)
        try:
            with disk_errors(private_folder):
                shutil.copytree(bundle_folder, private_folder)
            copied_bundle = Bundle.read(private_folder)
            copied_bundle.verify()
            return copied_bundle
        except StoreError:  # the disk is full
            shutil.rmtree(private_folder, ignore_errors=True)
            raise
        except (OSError, BundleError) as error:
            shutil.rmtree(private_folder, ignore_errors=True)
            if not remaining_attempts:
                if isinstance(error, BundleError) and last_change_time(bundle_folder) == changed_at:
                    raise  # the folder has not changed meanwhile, so the bundle itself is invalid
                raise StoreError(f"cannot copy the bundle at {bundle_folder}: {error}") from error
        time.sleep(COPY_PAUSE_S)  # a replacement may have interfered: the next copy may be complete
    raise AssertionError("unreachable")


def _stored_file_path(bundle_digest: str, file_name: str) -> str:
    return f"bundles/{bundle_digest}/{file_name}"


def _remove_host_copies(store: ArtefactStore, bundle_digest: str) -> None:
    """Remove this host's copy of a remote store's bundle: the generation has its own copy."""
    if store.local_folder is None:
        shutil.rmtree(store.local(f"bundles/{bundle_digest}"), ignore_errors=True)


def swap_in_folder(new_folder: Path, target_folder: Path) -> None:
    """Replace a folder by renames; on failure restore the old one. After a kill `heal_swap` restores it.

    A night that copies the bundle at that time copies the old one or the new one, or tries again.
    """
    for remaining_attempts in reversed(range(SWAP_TRIES_MAX)):
        old_folder = target_folder.with_name(f".{target_folder.name}.{secrets.token_hex(4)}.old")
        had_old_folder = target_folder.exists()
        if had_old_folder:
            target_folder.replace(old_folder)
        try:
            new_folder.replace(target_folder)
        except BaseException as error:
            if had_old_folder and old_folder.exists():
                old_folder.replace(target_folder)
            elif remaining_attempts and isinstance(error, OSError) and target_folder.exists():
                continue  # a night found no bundle and restored the old one: try again
            raise
        break
    for leftover in _swap_leftovers(target_folder, "old"):
        shutil.rmtree(leftover, ignore_errors=True)


def heal_swap(target_folder: Path) -> bool:
    """Restore the bundle that a `train` killed between two renames had moved aside; return whether there was one."""
    if target_folder.exists():
        return False
    for old_folder in _swap_leftovers(target_folder, "old"):
        try:
            old_folder.rename(target_folder)
        except OSError:
            continue
        return True
    return False


def sweep_training(target_folder: Path, *, changed_before_s: float) -> int:
    """Remove leftovers of killed trainings from before this time (Unix seconds); return the number of folders."""
    if not target_folder.exists():
        return 0
    leftovers = [
        leftover
        for suffix in ("old", "part")
        for leftover in _swap_leftovers(target_folder, suffix)
        if last_change_time(leftover) < changed_before_s
    ]
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    return len(leftovers)


def _swap_leftovers(target_folder: Path, suffix: str) -> list[Path]:
    """Return folders of killed swaps, newest first."""
    dated_folders = [
        (last_change_time(folder), folder)
        for folder in target_folder.parent.glob(f".{glob.escape(target_folder.name)}.????????.{suffix}")
    ]
    return [folder for _, folder in sorted(dated_folders, reverse=True)]
