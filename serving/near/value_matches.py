"""Near matches of a value table: the values of an input close by, by the numbers that were sent."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache.model.predictor import Predictor, PreparedInput
from serving.near.neighbours import NearOutcome, Neighbours

Numbers = NDArray[np.float32]


class ValueMatches:
    """Near matches of one value table for one kind of input.

    Its model's output is the answer, so that nothing is left to spare behind the model: inputs are compared by the
    numbers that were sent, and the model itself is spared. An answer is wrong if its first label is another one.
    """

    def __init__(self, table: str, neighbours: Neighbours[Numbers]) -> None:
        self.neighbours = neighbours
        self._table = table

    def predict(
        self,
        predictor: Predictor,
        batch: Sequence[PreparedInput],
        prints: Sequence[int],
        scored_at: int,
        blocked: NDArray[np.int64],  # noqa: ARG002 - no list, nothing to leave out
        version: int,  # noqa: ARG002
    ) -> tuple[list[bytes], list[float | None]]:
        """A record for each input, and the distance of the one whose values it has, None where it was computed."""
        neighbours = self.neighbours
        sent_vectors = predictor.sent_vectors(self._table, batch)
        near = neighbours.near(sent_vectors)
        outcomes: list[NearOutcome] = [
            "far" if near_answer is None else neighbours.decide(near_answer) for near_answer in near
        ]
        rows = [row for row, outcome in enumerate(outcomes) if outcome != "reuse"]
        computed_values = (
            predictor.vectors([batch[row] for row in rows])
            if rows
            else np.empty((0, 0), np.float32)
        )
        values_by_row = dict(zip(rows, computed_values, strict=True))
        values: list[Numbers] = []
        distances: list[float | None] = []
        for row, (near_answer, outcome) in enumerate(zip(near, outcomes, strict=True)):
            if near_answer is not None and outcome == "reuse":
                values.append(near_answer.answer)
                distances.append(round(near_answer.distance, 6))
                continue
            wrong = (
                near_answer is not None
                and near_answer.answer.argmax() != values_by_row[row].argmax()
            )
            values_copy, margin = values_by_row[row].copy(), _margin(values_by_row[row])
            neighbours.settle(
                sent_vectors[row],
                values_copy,
                near_answer,
                outcome,
                wrong=bool(wrong),
                margin=margin,
            )
            values.append(values_by_row[row])
            distances.append(None)
        neighbours.count(outcomes)
        return predictor.numbers(self._table, np.stack(values), prints, scored_at), distances


def _margin(values: Numbers) -> float:
    """Lead of the first label over the second."""
    second, first = np.partition(values, -2)[-2:]
    return float(first - second)
