"""Near matches of a top-K table: what the index found for a vector close by, scored exactly with the own vector."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.format.records.layout import NO_ITEM
from cache.model.list_search import ListSearch
from cache.model.predictor import Predictor, PreparedInput
from serving.near.neighbours import JUDGED, NearAnswer, NearOutcome, Neighbours

DEPTH = 2
"""Candidates kept of a search, in lengths of a list: the more, the farther away they still hold the best ones."""
DEPTH_MAX = 512
_ULP = 2.0**-23

Ordinals = NDArray[np.int64]
Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidates of one search, best first, -1 where there were no more; no other item scores above `beyond`.

    Scores are those in the direction of its vector; `beyond` is infinite where the index is not exact.
    """

    ordinals: NDArray[np.int32]
    beyond: float


class ListMatches:
    """Near matches of one top-K table for one kind of input.

    Only the search is spared: what a list leaves out, its scores and its order are those of any live answer. What may
    be missed is an item that the neighbour's search did not reach; an answer is wrong if it has less than `overlap` of
    the list that live would give.

    `reach`, where the index is exact, is the most that a score can change over a distance of one. No item beyond the
    candidates then scores above `beyond` + distance x reach (Cauchy-Schwarz): a list whose last item does is the live
    answer itself, whatever the policy knows.
    """

    def __init__(
        self,
        table: str,
        width: int,
        overlap: float,
        reach: float | None,
        neighbours: Neighbours[Candidates],
    ) -> None:
        self.neighbours = neighbours
        self._table = table
        self._width = width
        self._overlap = overlap
        self._reach = reach

    def predict(
        self,
        predictor: Predictor,
        batch: Sequence[PreparedInput],
        prints: Sequence[int],
        scored_at: int,
        blocked: Ordinals,
        version: int,
    ) -> tuple[list[bytes], list[float | None]]:
        """A record for each input, and the distance of the one whose candidates it has; None where it is live's own.

        `version` grows with each blocklist, whose ordinals are `blocked`.
        """
        neighbours, search = self.neighbours, predictor.search(self._table)
        vectors = predictor.vectors(batch)
        lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
        directions = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        excluded = search.excluded(batch, blocked)
        needed = search.counts(excluded)
        counts = needed.tolist()
        close = neighbours.near(directions, version)
        near = {
            row: near_answer
            for row, near_answer in enumerate(close)
            if near_answer is not None and self._is_worth(near_answer, counts[row])
        }
        outcomes: list[NearOutcome] = [
            "far" if near_answer is None else "leave" for near_answer in close
        ]
        ordinals = np.full((len(batch), self._width), NO_ITEM, np.uint32)
        scores = np.zeros((len(batch), self._width), np.float32)
        if rows := list(near):
            candidate_sets, row_exclusions = (
                [near[row].answer for row in rows],
                [excluded[row] for row in rows],
            )
            candidates = [
                candidate_set.ordinals.astype(np.int64) for candidate_set in candidate_sets
            ]
            ordinals[rows], scores[rows] = search.rank_candidates(
                vectors[rows], candidates, row_exclusions
            )
            distances = np.array([near[row].distance for row in rows])
            proven = self._proven(
                search, directions[rows], ordinals[rows, -1], candidate_sets, distances
            )
            for row, is_proven in zip(rows, proven, strict=True):
                outcomes[row] = "proven" if is_proven else neighbours.decide(near[row])
        if rows := [
            row
            for row, row_outcome in enumerate(outcomes)
            if row_outcome not in ("proven", "reuse")
        ]:
            depth = min(DEPTH * self._width, DEPTH_MAX, search.searcher.depth_max)
            deep = search.candidates(vectors[rows], np.maximum(needed[rows], depth), blocked)
            needed_candidates = [
                deep_ordinals[: counts[row]] for row, deep_ordinals in zip(rows, deep, strict=True)
            ]
            best_lists = search.rank_candidates(
                vectors[rows], needed_candidates, [excluded[row] for row in rows]
            )
            searched_candidate_sets = self._to_candidates(search, directions[rows], deep)
            for row, answer, items in zip(
                rows, searched_candidate_sets, best_lists[0], strict=True
            ):
                is_judged = outcomes[row] in JUDGED
                wrong = is_judged and _overlap(ordinals[row], items) < self._overlap
                neighbours.settle(
                    directions[row], answer, near.get(row), outcomes[row],
                    wrong=wrong, version=version,
                )  # fmt: skip
            ordinals[rows], scores[rows] = best_lists
        neighbours.count(outcomes)
        reused = [
            round(near[row].distance, 6) if outcome == "reuse" else None
            for row, outcome in enumerate(outcomes)
        ]
        return predictor.lists(self._table, (ordinals, scores), prints, scored_at), reused

    def _is_worth(self, near: NearAnswer[Candidates], count: int) -> bool:
        """True if its candidates hold a whole list and may be of use."""
        may_use = self._reach is not None or self.neighbours.may_use(near)
        return may_use and len(near.answer.ordinals) >= count

    def _proven(
        self,
        search: ListSearch,
        directions: Vectors,
        last: NDArray[np.uint32],
        candidate_sets: Sequence[Candidates],
        distances: NDArray[np.float64],
    ) -> list[bool]:
        """True for each list, which ends with the item `last`, if no item beyond the candidates can be in it."""
        if self._reach is None:
            return [False] * len(candidate_sets)
        is_full = last != NO_ITEM
        beyond = np.array([candidate_set.beyond for candidate_set in candidate_sets])
        last_scores = search.scores(directions, np.where(is_full, last, 0).astype(np.int64))
        rounding = 4 * directions.shape[1] * _ULP  # of four sums of so many products
        is_above = last_scores > beyond + (distances + rounding) * self._reach
        proven: list[bool] = (np.isneginf(beyond) | (is_full & is_above)).tolist()
        return proven

    def _to_candidates(
        self, search: ListSearch, directions: Vectors, searched_ordinals: Sequence[Ordinals]
    ) -> list[Candidates]:
        """Candidates as they are kept: as copies, for they are parts of a whole batch's."""
        beyond = np.full(len(searched_ordinals), math.inf)
        if self._reach is not None:
            last = np.array([row_ordinals[-1] for row_ordinals in searched_ordinals])
            is_all = (last < 0) | (
                np.array([len(row_ordinals) for row_ordinals in searched_ordinals])
                == search.items.count
            )
            scores = search.scores(directions, np.maximum(last, 0))
            beyond = np.where(is_all, -math.inf, scores.astype(np.float64))
        return [
            Candidates(row_ordinals.astype(np.int32), score_bound)
            for row_ordinals, score_bound in zip(searched_ordinals, beyond.tolist(), strict=True)
        ]


def _overlap(reused_items: NDArray[np.uint32], computed_items: NDArray[np.uint32]) -> float:
    """Share of the wanted items that were found; 1 where none are wanted."""
    of = set(computed_items.tolist()) - {NO_ITEM}
    return len(of.intersection(reused_items.tolist())) / len(of) if of else 1.0
