"""Check that the artefact store and Redis belong together: a release record in the store must explain the pointer."""

from typing import TYPE_CHECKING

from cache.control.control_keys import Control
from cache.errors import ConfigError, Conflict, CorruptArtefact, TierUnavailable
from cache.l2.sync_clients import connect
from cache.store.releases import all_releases

if TYPE_CHECKING:
    from cache.config.shared import SharedConfig


def unexplained_pointer_message(pointer_epoch: int) -> str:
    """Return the message for a pointer of this epoch that no release record explains."""
    return (
        f"Redis holds a pointer of epoch {pointer_epoch} that no release record explains; is this its artefact store?"
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
    restore_command = 'restore --adopt --reason "..."' if pointer.epoch > max(epochs, default=0) else "restore"
    return (
        f"{unexplained_pointer_message(pointer.epoch)} (key {config.keyspace().live}, artefact store {store.url}). "
        "If not, correct "
        f"artifacts (LARDER_ARTIFACTS) or namespace (LARDER_NAMESPACE); if it is, run `larder {restore_command}`"
    )


def demand_own_store(config: "SharedConfig", redis_url: str | None, timeout_s: float) -> None:
    """Raise Conflict before a command writes into a store that belongs to another Redis; see `store_mismatch`."""
    if (mismatch := store_mismatch(config, redis_url, timeout_s)) is not None:
        raise Conflict(mismatch)
