"""Holdout: interactions after the cut of a bounded sample of users, by which the gates judge the night."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from cache.format.ids import fingerprints
from cache.store.artefacts import write_atomically
from precompute.sources.readers import Interactions

HOLDOUT_FILE: Final = "work/holdout.json"
HOLDOUT_USERS_MAX: Final = 2_000
HOLDOUT_ITEMS_MAX: Final = 50


class Holdout:
    """Collector of interactions after the cut of the users with the smallest fingerprints, in any row order."""

    def __init__(self, users_max: int = HOLDOUT_USERS_MAX) -> None:
        self._users_max = users_max
        self.restart()

    def restart(self) -> None:
        """Forget all interactions, because the sources are read again."""
        self._fingerprint_limit = 2**64
        self._fingerprint_by_user: dict[str, int] = {}
        self._items_by_user: dict[str, dict[str, None]] = {}

    def add(self, late_batch: Interactions) -> None:
        """Add a batch of interactions at or after the cut."""
        user_names: list[str] = late_batch.user_ids.distinct_ids.to_pylist()
        user_fingerprints = fingerprints(late_batch.user_ids.distinct_raw_ids()).tolist()
        is_sampled = np.array([fingerprint < self._fingerprint_limit for fingerprint in user_fingerprints], np.bool_)
        sampled_row_mask = is_sampled[late_batch.user_ids.id_codes]
        for user_code, item in zip(
            late_batch.user_ids.id_codes[sampled_row_mask].tolist(),
            late_batch.item_ids.only(sampled_row_mask).row_texts().to_pylist(),
            strict=True,
        ):
            self._fingerprint_by_user[user_names[user_code]] = user_fingerprints[user_code]
            user_items = self._items_by_user.setdefault(user_names[user_code], {})
            if len(user_items) < HOLDOUT_ITEMS_MAX:
                user_items[item] = None
        if len(self._fingerprint_by_user) > 2 * self._users_max:
            self._trim_users()

    def _trim_users(self) -> None:
        sampled_users = sorted(self._fingerprint_by_user, key=self._fingerprint_by_user.__getitem__)[: self._users_max]
        self._fingerprint_by_user = {user_name: self._fingerprint_by_user[user_name] for user_name in sampled_users}
        self._items_by_user = {user_name: self._items_by_user[user_name] for user_name in sampled_users}
        if len(sampled_users) == self._users_max and sampled_users:
            self._fingerprint_limit = self._fingerprint_by_user[sampled_users[-1]] + 1

    def write(self, generation_folder: Path) -> str:
        """Write the file in a generation's folder; return its path. An empty file means that nothing was held out."""
        self._trim_users()
        item_list_by_user = {user_name: list(items) for user_name, items in self._items_by_user.items()}
        write_atomically(generation_folder / HOLDOUT_FILE, orjson.dumps(item_list_by_user))
        return HOLDOUT_FILE


def read_holdout(generation_folder: Path) -> Mapping[str, list[str]]:
    """Read user -> items; raise FileNotFoundError if the night kept none."""
    items_by_user: Any = orjson.loads((generation_folder / HOLDOUT_FILE).read_bytes())
    return dict(items_by_user)
