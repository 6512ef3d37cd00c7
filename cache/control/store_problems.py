"""Problems of artefact store and Redis, and of both together: a release record must explain the pointer."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from cache.control.control_keys import Control, Replica, demand_readers_of_night
from cache.control.states import fold_releases
from cache.errors import ConfigError, Conflict, CorruptArtefact, Refused, StoreError, TierUnavailable
from cache.l2.sync_clients import connect
from cache.process.host import disk_free_bytes
from cache.store.artefacts import ArtefactStore, find_lost_files
from cache.store.blocklist import latest_blocklist
from cache.store.erasures import lost_records_problems
from cache.store.releases import Pointer, Release, all_releases, demand_released_manifest

if TYPE_CHECKING:
    from cache.config.shared import SharedConfig


STORE_FREE_BYTES_MIN = 1 << 20
"""Free bytes of the disk of a local store below which it counts as full."""

UNREAD_BLOCKLIST_PROBLEM = (
    "cannot read the newest blocklist, so what was blocked or erased since may still be served: its log has the error; "
    "is the artefact store reachable and readable from its host, or was an older copy of it put back?"
)
"""What is wrong with a replica whose heartbeat has the stale reason `blocklist_unreadable`."""

ADOPT_COMMAND = 'larder restore --adopt --reason "..."'
"""Command that makes a Redis follow a store whose releases do not explain its pointer."""


def unexplained_pointer_message(pointer: Pointer) -> str:
    """Return the message for a pointer that no release record explains."""
    return (
        f"Redis holds a pointer of epoch {pointer.epoch} ({pointer.generation}) that no release record explains; is "
        "this its artefact store?"
    )


def missing_records_text(store: ArtefactStore) -> str:
    """Describe a store without any release record: its folder does not exist, is empty, or has other files only."""
    if store.names(""):
        return f"the artefact store {store.url} has no release record"
    if store.local_folder is None:
        return f"the artefact store {store.url} is empty"
    state_text = "is empty" if store.local_folder.is_dir() else "does not exist"
    return f"the folder {store.local_folder} {state_text}"


def missing_records_advice(store: ArtefactStore) -> str:
    """Say what to look at if a store without any release record belongs to something that was published.

    Adopting such a store is no advice: it would forget every release and erasure.
    """
    return (
        f"{missing_records_text(store)}: is it mounted? If it is, correct artifacts (LARDER_ARTIFACTS) or namespace "
        "(LARDER_NAMESPACE)"
    )


def unexplained_pointer_problem(
    pointer: Pointer, history: Sequence[Release], store: ArtefactStore, live_key: str
) -> str | None:
    """Return the problem that no release record of the store explains the pointer, with the remedy; None if one does.

    Read the pointer before the history: its record was written before it.
    """
    epochs = [release.epoch for release in history]
    if pointer.epoch in epochs:
        return None
    message = unexplained_pointer_message(pointer)
    if not epochs:
        return f"{message} (key {live_key}): {missing_records_advice(store)}"
    restore_command = ADOPT_COMMAND if pointer.epoch > max(epochs) else "larder restore"
    return (
        f"{message} (key {live_key}, artefact store {store.url}). If not, correct artifacts (LARDER_ARTIFACTS) or "
        f"namespace (LARDER_NAMESPACE); if it is, run `{restore_command}`"
    )


def pointer_problem(
    pointer: Pointer | None, history: Sequence[Release], store: ArtefactStore, live_key: str
) -> str | None:
    """Return the problem that the pointer is unexplained, lost, or older than the releases; None if it is none."""
    ledger = fold_releases(history)
    if pointer is None:
        return ledger.live_generation and (
            f"Redis has lost its pointer ({live_key}), though {ledger.live_generation} is live by the store: run "
            "`larder restore`"
        )
    if (problem := unexplained_pointer_problem(pointer, history, store, live_key)) is not None:
        return problem
    if pointer.epoch < ledger.live_epoch:
        return (
            f"Redis has the epoch {pointer.epoch}, the release records have {ledger.live_epoch} (was Redis put back "
            "from a copy?): run `larder restore`"
        )
    return None


def full_store_problem(store: ArtefactStore) -> str | None:
    """Return the problem that the store's disk is full; None if there is room, or if this host cannot write it.

    That is a remote store or a file system mounted read-only, such as an image, which has no free bytes.
    """
    folder = store.local_folder
    if folder is None:
        return None
    free_bytes = disk_free_bytes(folder)
    if free_bytes >= STORE_FREE_BYTES_MIN or (folder.exists() and os.statvfs(folder).f_flag & os.ST_RDONLY):
        return None
    return (
        f"the disk of the artefact store {store.url} is full ({free_bytes:,} bytes are free): blocks, erasures and "
        "nights cannot be written; make room"
    )


def unwritable_store_problem(store: ArtefactStore) -> str | None:
    """Return the problem that this process may not write into a local store; None if it may, or if it is remote."""
    if store.local_folder is None or not store.local_folder.is_dir():
        return None
    if os.access(store.local_folder, os.W_OK | os.X_OK):
        return None
    return (
        f"the artefact store {store.url} is read-only here: blocks, erasures, moves and nights cannot be written; "
        "mount it writable, or correct the permissions"
    )


def replicas_ahead(replicas: Iterable[Replica], blocklist_version: int) -> list[Replica]:
    """Return the replicas that have read a newer version of the blocklist than this one, the newest of the store."""
    return [replica for replica in replicas if (replica.blocklist_version or 0) > blocklist_version]


def older_store_message(ahead: Collection[Replica], blocklist_version: int, store_url: str) -> str:
    """Return the message for a store whose blocklist is older than what these replicas have in force."""
    names = ", ".join(sorted(replica.name for replica in ahead))
    version_in_force = max(replica.blocklist_version or 0 for replica in ahead)
    return (
        f"replica{'s' * (len(ahead) > 1)} {names} {'have' if len(ahead) > 1 else 'has'} version {version_in_force} of "
        f"the blocklist in force, the newest in {store_url} is {blocklist_version}: the store is older than what is in "
        "force, and a replica that starts now serves what was blocked or erased since. Put back a newer copy of the "
        "store; or repeat the blocks and erasures since the copy (`larder block --list` and `larder erase --list` with "
        "LARDER_ARTIFACTS=FOLDER of the store that was replaced show them), then restart the replicas"
    )


def older_store_remarks(store: ArtefactStore, replicas: Iterable[Replica]) -> list[str]:
    """Return a remark if replicas have a newer blocklist in force than the store has; empty if none has.

    Read the heartbeats before the store: a version is in the store before a replica reads it.
    """
    replicas, newest_version = list(replicas), latest_blocklist(store).version
    ahead = replicas_ahead(replicas, newest_version)
    return [older_store_message(ahead, newest_version, store.url)] if ahead else []


def generation_files_problems(store: ArtefactStore, history: Sequence[Release]) -> list[str]:
    """Return a problem for each generation live, on trial or previous whose files are lost or whose manifest changed.

    Contents of other files are not read.
    """
    ledger = fold_releases(history)
    canary_generation = None if ledger.canary is None else ledger.canary.generation
    consequence_by_generation = {
        ledger.previous_generation: "the previous one: no roll back to it can load its pages or models again",
        canary_generation: "the canary: a replica that starts cannot load it",
        ledger.live_generation: "live: a replica that starts cannot load it, and no `larder restore` can refill Redis",
    }
    problems = []
    for generation, consequence in consequence_by_generation.items():
        if generation is None:
            continue
        try:
            lost_paths = find_lost_files(store, generation)
            if not lost_paths:
                demand_released_manifest(store, generation, history)
        except CorruptArtefact as error:
            problems.append(
                f"{error.message}; {generation} is {consequence}; put the manifest back from a copy of the store, or "
                "run `larder night`"
            )
            continue
        except StoreError as error:
            if store.local_folder is None:  # a remote store may answer the next time
                raise
            problems.append(
                f"{error.message}; {generation} is {consequence}; let this user read the file, or put it back"
            )
            continue
        if lost_paths:
            problems.append(
                f"the artefact store {store.url} lacks {len(lost_paths):,} of the files of {generation} "
                f"({lost_paths[0]}{', ...' * (len(lost_paths) > 1)}), which is {consequence}; put the files back from "
                "a copy of the store, or run `larder night`"
            )
    return problems


def unreadable_night_problem(control: Control) -> str | None:
    """Return why a night of this release is refused by a replica of another release; None if all can read it."""
    try:
        demand_readers_of_night(control)
    except Refused as error:
        return error.message
    return None


def namespace_problems(config: "SharedConfig", redis_url: str | None, timeout_s: float, *, is_own: bool) -> list[str]:
    """Return the problems of store, pointer, registry and replicas for which nights and moves are refused.

    Without a Redis, or if it cannot be asked, only those of the store. `is_own`: a command started this Redis and
    fills it, so a lost pointer is no problem. Raises ConfigError if the Redis user has no rights in this namespace.
    """
    problems, replicas = list[str | None](), list[Replica]()
    pointer, is_pointer_known = None, False
    if redis_url:
        try:  # before the store is read: what Redis names was written there earlier
            with connect(redis_url, timeout_s, namespace=config.namespace) as client:
                control = Control(client, config.keyspace())
                replicas = control.replicas()
                problems.append(unreadable_night_problem(control))
                pointer, is_pointer_known = control.read_pointer(), True
                control.rows()
        except CorruptArtefact as error:  # its text has the remedy
            problems.append(error.message)
        except TierUnavailable:
            pass
        except ConfigError as error:
            if "namespace" in error.details:
                raise
    store = config.store()
    history = all_releases(store)
    if is_pointer_known and (pointer is not None or not is_own):
        problems.append(pointer_problem(pointer, history, store, config.keyspace().live))
    older_remarks = older_store_remarks(store, replicas)
    problems += older_remarks or [
        f"replica {replica.name} {UNREAD_BLOCKLIST_PROBLEM}"
        for replica in replicas
        if "blocklist_unreadable" in replica.stale_reasons
    ]
    problems += generation_files_problems(store, history)
    problems += lost_records_problems(store)
    return [problem for problem in (*problems, full_store_problem(store)) if problem]


def demand_own_store(config: "SharedConfig", redis_url: str | None, timeout_s: float) -> None:
    """Raise Conflict before a command writes into a store that belongs to another Redis.

    Nothing is compared without a Redis or a pointer, or if Redis cannot be asked. Raises ConfigError if the Redis user
    has no rights in this namespace.
    """
    if not redis_url:
        return
    try:
        with connect(redis_url, timeout_s, namespace=config.namespace) as client:
            pointer = Control(client, config.keyspace()).read_pointer()
    except (TierUnavailable, CorruptArtefact):
        return
    except ConfigError as error:
        if "namespace" in error.details:
            raise
        return
    if pointer is None:
        return
    store = config.store()
    problem = unexplained_pointer_problem(pointer, all_releases(store), store, config.keyspace().live)
    if problem is not None:
        raise Conflict(problem)
