"""Check that the artefact store and Redis belong together: a release record in the store must explain the pointer."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from cache.control.control_keys import Control, Replica
from cache.control.states import fold_releases
from cache.errors import ConfigError, Conflict, CorruptArtefact, TierUnavailable
from cache.l2.sync_clients import connect
from cache.process.host import disk_free_bytes
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import latest_blocklist
from cache.store.releases import all_releases

if TYPE_CHECKING:
    from cache.config.shared import SharedConfig


STORE_FREE_BYTES_MIN = 1 << 20
"""Free bytes of the disk of a local store below which it counts as full."""

ADOPT_COMMAND = 'larder restore --adopt --reason "..."'
"""Command that makes a Redis follow a store whose releases do not explain its pointer."""


def unexplained_pointer_message(pointer_epoch: int) -> str:
    """Return the message for a pointer of this epoch that no release record explains."""
    return (
        f"Redis holds a pointer of epoch {pointer_epoch} that no release record explains; is this its artefact store?"
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


def store_mismatch(config: "SharedConfig", redis_url: str | None, timeout_s: float) -> str | None:
    """Describe the mismatch if the store has no record for Redis' pointer, with the remedy; None if it has one.

    Also returns None without a Redis or a pointer, or if Redis cannot be asked, as nothing can be compared. Raises
    ConfigError if the Redis user has no rights in this namespace.
    """
    if not redis_url:
        return None
    try:
        # Read the pointer first: its record was written before it.
        with connect(redis_url, timeout_s, namespace=config.namespace) as client:
            pointer = Control(client, config.keyspace()).read_pointer()
    except (TierUnavailable, CorruptArtefact):
        return None
    except ConfigError as error:
        if "namespace" in error.details:
            raise
        return None
    if pointer is None:
        return None
    store = config.store()
    epochs = [release.epoch for release in all_releases(store)]
    if pointer.epoch in epochs:
        return None
    if not epochs:
        return (
            f"{unexplained_pointer_message(pointer.epoch)} (key {config.keyspace().live}): "
            f"{missing_records_advice(store)}"
        )
    restore_command = ADOPT_COMMAND if pointer.epoch > max(epochs) else "larder restore"
    return (
        f"{unexplained_pointer_message(pointer.epoch)} (key {config.keyspace().live}, artefact store {store.url}). "
        "If not, correct "
        f"artifacts (LARDER_ARTIFACTS) or namespace (LARDER_NAMESPACE); if it is, run `{restore_command}`"
    )


def full_store_problem(store: ArtefactStore) -> str | None:
    """Return the problem that the store's disk is full; None if there is room, or if the store is not on this host."""
    if store.local_folder is None:
        return None
    free_bytes = disk_free_bytes(store.local_folder)
    if free_bytes >= STORE_FREE_BYTES_MIN:
        return None
    return (
        f"the disk of the artefact store {store.url} is full ({free_bytes:,} bytes are free): blocks, erasures and "
        "nights cannot be written; make room"
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


def older_store_problem(config: "SharedConfig", redis_url: str | None, timeout_s: float) -> str | None:
    """Return `older_store_message` if heartbeats show it; None also without a Redis, or if it cannot be asked."""
    if not redis_url:
        return None
    try:
        with connect(redis_url, timeout_s, namespace=config.namespace) as client:
            replicas = Control(client, config.keyspace()).replicas()
    except (TierUnavailable, ConfigError):
        return None
    return next(iter(older_store_remarks(config.store(), replicas)), None)


def pointer_problem(config: "SharedConfig", redis_url: str | None, timeout_s: float) -> str | None:
    """Return the problem that Redis' pointer is unreadable, older than the store's releases, or lost; None if neither.

    Also returns None without a Redis, or if it cannot be asked. A pointer that is newer is one of `store_mismatch`.
    """
    if not redis_url:
        return None
    try:
        with connect(redis_url, timeout_s, namespace=config.namespace) as client:
            pointer = Control(client, config.keyspace()).read_pointer()
    except (TierUnavailable, ConfigError):
        return None
    except CorruptArtefact as error:  # its text has the remedy
        return error.message
    ledger = fold_releases(all_releases(config.store()))
    if ledger.live_generation is None:
        return None
    if pointer is None:
        return (
            f"Redis has lost its pointer ({config.keyspace().live}), though {ledger.live_generation} is live by the "
            "store: run `larder restore`"
        )
    if pointer.epoch < ledger.live_epoch:
        return (
            f"Redis has the epoch {pointer.epoch}, the release records have {ledger.live_epoch} (was Redis put back "
            "from a copy?): run `larder restore`"
        )
    return None


def demand_own_store(config: "SharedConfig", redis_url: str | None, timeout_s: float) -> None:
    """Raise Conflict before a command writes into a store that belongs to another Redis; see `store_mismatch`."""
    if (mismatch := store_mismatch(config, redis_url, timeout_s)) is not None:
        raise Conflict(mismatch)
