"""Holdout: interactions after the cut, of a bounded sample of users, which the night is judged by."""

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
    """Collector of interactions after the cut; keeps users with the smallest fingerprints, independent of row order."""

    def __init__(self, users_max: int = USERS_MAX) -> None:
        self._users_max = users_max
        self.restart()

    def restart(self) -> None:
        """Forget all interactions, because the sources are read again."""
        self._below = 2**64
        self._fingerprint_by_user: dict[str, int] = {}
        self._items: dict[str, dict[str, None]] = {}

    def add(self, late: Interactions) -> None:
        """Add a batch of interactions at or after the cut."""
        names: list[str] = late.users.names.to_pylist()
        user_fingerprints = fingerprints(late.users.raws()).tolist()
        is_sampled = np.array(
            [fingerprint < self._below for fingerprint in user_fingerprints], np.bool_
        )
        rows = is_sampled[late.users.codes]
        for code, item in zip(
            late.users.codes[rows].tolist(), late.items.only(rows).texts().to_pylist(), strict=True
        ):
            self._fingerprint_by_user[names[code]] = user_fingerprints[code]
            user_items = self._items.setdefault(names[code], {})
            if len(user_items) < ITEMS_MAX:
                user_items[item] = None
        if len(self._fingerprint_by_user) > 2 * self._users_max:
            self._trim()

    def _trim(self) -> None:
        sampled_users = sorted(
            self._fingerprint_by_user, key=self._fingerprint_by_user.__getitem__
        )[: self._users_max]
        self._fingerprint_by_user = {
            name: self._fingerprint_by_user[name] for name in sampled_users
        }
        self._items = {name: self._items[name] for name in sampled_users}
        if len(sampled_users) == self._users_max and sampled_users:
            self._below = self._fingerprint_by_user[sampled_users[-1]] + 1

    def write(self, root: Path) -> str:
        """Write the file in a generation's folder, even if it is empty, which is then known; return its path."""
        self._trim()
        data = {name: list(items) for name, items in self._items.items()}
        write_atomically(root / FILE, orjson.dumps(data))
        return FILE


def read_holdout(root: Path) -> Mapping[str, list[str]]:
    """Read user -> items; raise FileNotFoundError if the night kept none."""
    items_by_user: Any = orjson.loads((root / FILE).read_bytes())
    return dict(items_by_user)
