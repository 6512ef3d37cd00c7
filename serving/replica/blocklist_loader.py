"""Blocklist to put in force: the newest version in the store that can be read."""

from cache.errors import CorruptArtefact, LarderError, StoreError
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist


def newest_blocklist(store: ArtefactStore, current: int) -> tuple[Blocklist | None, str | None]:
    """The newest readable version above `current` (-1: none yet), and why it is not the newest of all."""
    names = store.names("blocklist")
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    versions = sorted(
        {int(stem): stem for stem in stems if len(stem) == 12 and stem.isdecimal()}.items(),
        reverse=True,
    )
    newest_version = versions[0][0] if versions else 0
    if newest_version < current:
        raise StoreError(
            f"version {newest_version} is the newest in the store, {current} is in force"
        )
    if not versions and not store.names(""):
        # A volume that is not mounted looks like a store in which nothing was ever blocked.
        raise StoreError(f"there is nothing at all in {store.url}")
    trouble = None
    for version, stem in versions:
        if version <= current:
            return None, trouble
        try:
            return _read(store, version, stem), trouble
        except (LarderError, OSError, ValueError) as error:
            trouble = trouble or f"version {version}: {error}"
    return (Blocklist() if not versions and current < 0 else None), trouble


def _read(store: ArtefactStore, version: int, stem: str) -> Blocklist:
    raw = store.read(f"blocklist/{stem}.json")
    blocklist = None if raw is None else Blocklist.from_bytes(raw)
    if blocklist is None or blocklist.version != version:
        raise CorruptArtefact(
            "is not there" if blocklist is None else f"calls itself {blocklist.version}"
        )
    return blocklist
