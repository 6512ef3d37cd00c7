"""Interactions newer than the cut, of a bounded sample of users: what a night could not know, to be judged by."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from cache.format.ids import fingerprints
from cache.store.artefacts import write_atomically
from precompute.sources.readers import Interactions

FILE: Final = "work/holdout.json"
USERS_MAX: Final = 2_000
ITEMS_MAX: Final = 50


class Holdout:
    """Collects what lies beyond the cut; of many users those with the smallest fingerprints, so any order does."""

    def __init__(self, users_max: int = USERS_MAX) -> None:
        self._users_max = users_max
        self.restart()

    def restart(self) -> None:
        """Forget what was taken in: the sources are read again."""
        self._below = 2**64
        self._marks: dict[str, int] = {}
        self._items: dict[str, dict[str, None]] = {}

    def add(self, late: Interactions) -> None:
        """Take in a batch of interactions at or after the cut."""
        names: list[str] = late.users.names.to_pylist()
        marks = fingerprints(late.users.raws()).tolist()
        chosen = np.array([mark < self._below for mark in marks], np.bool_)
        rows = chosen[late.users.codes]
        for code, item in zip(
            late.users.codes[rows].tolist(), late.items.only(rows).texts().to_pylist(), strict=True
        ):
            self._marks[names[code]] = marks[code]
            found = self._items.setdefault(names[code], {})
            if len(found) < ITEMS_MAX:
                found[item] = None
        if len(self._marks) > 2 * self._users_max:
            self._trim()

    def _trim(self) -> None:
        kept = sorted(self._marks, key=self._marks.__getitem__)[: self._users_max]
        self._marks = {name: self._marks[name] for name in kept}
        self._items = {name: self._items[name] for name in kept}
        if len(kept) == self._users_max and kept:
            self._below = self._marks[kept[-1]] + 1

    def write(self, root: Path) -> str:
        """The file under a generation's folder, written also when it holds nothing: then that is known."""
        self._trim()
        data = {name: list(items) for name, items in self._items.items()}
        write_atomically(root / FILE, orjson.dumps(data))
        return FILE


def read_holdout(root: Path) -> Mapping[str, list[str]]:
    """User -> items; raises FileNotFoundError when the night kept none."""
    found: Any = orjson.loads((root / FILE).read_bytes())
    return dict(found)
