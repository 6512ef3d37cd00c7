"""Position up to which nights have taken events over, as the store tells it to who takes events in."""

from typing import Final

import orjson

from cache.errors import CorruptArtefact, InvalidInput
from cache.events.position import BEGINNING, Position
from cache.store.artefacts import ArtefactStore

FILE: Final = "events/taken.json"


def note_taken(store: ArtefactStore, position: Position) -> None:
    """Writes the position, unless it is there."""
    position_json = orjson.dumps({"until": str(position)})
    if store.read(FILE) != position_json:
        store.write(FILE, position_json)


def read_taken(store: ArtefactStore) -> Position:
    """The position, `BEGINNING` before any; raises StoreError, and CorruptArtefact for what is none."""
    raw = store.read(FILE)
    try:
        return BEGINNING if raw is None else Position.parse(orjson.loads(raw)["until"])
    except (orjson.JSONDecodeError, InvalidInput, KeyError, TypeError) as error:
        raise CorruptArtefact(f"{FILE} names no position: {error}", path=FILE) from error
