"""Clicks of the shape of MovieLens-100K, drawn: 943 users, 1,682 items, 100,000 clicks, a fifth of which is held out.

A user draws items without replacement, in proportion to the exponential of the product of both vectors plus the item's
popularity, which falls by rank as Zipf has it; the order of a user's clicks says nothing. An item's vector lies by that
of its genre.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

USERS, ITEMS, CLICKS, USER_CLICKS_MIN = 943, 1_682, 100_000, 20
GENRES = (
    "action", "adventure", "animation", "children", "comedy", "crime", "documentary", "drama", "fantasy",
    "noir", "horror", "musical", "mystery", "romance", "science", "thriller", "war", "western",
)  # fmt: skip
DIMS, TASTE, POPULARITY = 8, 0.7, 0.8
EVALUATED_COUNT, TOP = 200, 20


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Histories of users in the order of their clicks, and what is held out of them; `genres` of items by number."""

    histories: tuple[NDArray[np.int64], ...]
    held_out: tuple[NDArray[np.int64], ...]
    genres: NDArray[np.int64]

    @property
    def matrix(self) -> sp.csr_matrix:
        """Clicks that models are fitted on, float32 [users, items], each 1."""
        rows = np.repeat(np.arange(USERS), [len(history) for history in self.histories])
        columns = np.concatenate(self.histories)
        return sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), (USERS, ITEMS))

    @property
    def evaluated_users(self) -> NDArray[np.int64]:
        """Users whose lists are asked for."""
        return np.sort(np.random.default_rng(1).choice(USERS, EVALUATED_COUNT, replace=False))

    def rows(self) -> list[tuple[int, int, int]]:
        """(user, item, time) of each click that models are fitted on."""
        return [
            (user, int(item), time) for user, history in enumerate(self.histories) for time, item in enumerate(history)
        ]

    def write(self, path: Path) -> Path:
        """Write a table of them with the columns user, item and timestamp."""
        lines = (f"{user},{item},{time}\n" for user, item, time in self.rows())
        path.write_text("user,item,timestamp\n" + "".join(lines))
        return path

    def padded(self, users: NDArray[np.int64], length: int, pad: int, first: int = 0) -> NDArray[np.int64]:
        """Last `length` items of these users' histories, [users, length], padded behind; items count from `first`."""
        padded_items = np.full((len(users), length), pad, np.int64)
        for row, user in enumerate(users):
            last = self.histories[user][-length:] + first
            padded_items[row, : len(last)] = last
        return padded_items

    def rank_items(self, scores: NDArray[np.floating]) -> NDArray[np.int64]:
        """Lists [asked, TOP] by the scores of these users, float [asked, items], their histories left out."""
        remaining_scores = np.array(scores, np.float64)
        for row, user in enumerate(self.evaluated_users):
            remaining_scores[row, self.histories[user]] = -np.inf
        return np.argsort(-remaining_scores, axis=1, kind="stable")[:, :TOP]

    def recall(self, lists: NDArray[np.int64]) -> float:
        """Mean recall@TOP over the asked users: hits / min(TOP, number held out)."""
        return float(
            np.mean(
                [
                    len(np.intersect1d(row, self.held_out[user])) / min(TOP, len(self.held_out[user]))
                    for row, user in zip(lists, self.evaluated_users, strict=True)
                ]
            )
        )


def draw(seed: int = 0) -> Cut:
    """The same clicks for the same seed."""
    rng = np.random.default_rng(seed)
    genres = rng.integers(len(GENRES), size=ITEMS)
    items = rng.normal(size=(len(GENRES), DIMS))[genres] + 0.5 * rng.normal(size=(ITEMS, DIMS))
    popularity = -POPULARITY * np.log1p(rng.permutation(ITEMS))
    activity = rng.lognormal(sigma=0.8, size=USERS)
    lengths = USER_CLICKS_MIN + rng.multinomial(CLICKS - USER_CLICKS_MIN * USERS, activity / activity.sum())
    histories, held_out = [], []
    for length in lengths:
        # Taking the largest of logits plus Gumbel noise, in order, draws without replacement.
        scores = popularity + TASTE * items @ rng.normal(size=DIMS) + rng.gumbel(size=ITEMS)
        drawn = rng.permutation(np.argsort(-scores)[:length])
        held_out_indexes = rng.choice(length, length // 5, replace=False)
        histories.append(np.delete(drawn, held_out_indexes))
        held_out.append(drawn[held_out_indexes])
    return Cut(tuple(histories), tuple(held_out), genres)
