"""Preparation of callers' inputs for a tower, a whole batch at once. Pure."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.format.ids import FeatureValue
from cache.format.item_table import ItemTable, Ordinals
from cache.model.feature_checks import check_features
from cache.model.tower_spec import TowerSpec

HISTORY_LIMIT: Final = "history_limit"
"""Fact of a manifest: of a history its night's models were given the newest so many items, whatever they would take."""


@dataclass(frozen=True, slots=True)
class LiveInput:
    """Input that a caller sent to compute from; `item` is the ordinal of an item table's entity."""

    history: tuple[bytes, ...] | None = None
    features: Mapping[str, FeatureValue] | None = None
    item: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedInput:
    """Input for its tower; `excluded` never appears in the answer, the model lacks `unknown_id_count` ids."""

    table: str
    history: NDArray[np.int64]
    features: Mapping[str, FeatureValue]
    item_index: int
    excluded: NDArray[np.int64]
    unknown_id_count: int


def prepare_all(
    table: str,
    spec: TowerSpec,
    items: ItemTable,
    sources: Sequence[LiveInput],
    history_limit: int = sys.maxsize,
) -> list[PreparedInput | InvalidInput | None]:
    """Prepares each input: ready for the tower, None if nothing usable was sent, or what is wrong with its features.

    Of a history the tower is given the newest `history_limit` items, as by night; all of it is excluded. One look-up
    serves all histories, so that the fixed cost of numpy's calls is paid once per batch.
    """
    ids: list[bytes] = []
    ends = [0]
    for source in sources:
        if source.history:
            ids += keep_last_occurrences(source.history)
        ends.append(len(ids))
    ordinals = items.ordinals_of(ids)
    indices = items.to_model(ordinals)
    known_indices, known_ends = _drop_unknown(indices, ends)
    excluded, excluded_ends = _drop_unknown(ordinals, ends)
    item_ordinals = np.array(
        [-1 if source.item is None else source.item for source in sources], np.int64
    )
    own_indices = (
        items.to_model(Ordinals(item_ordinals)).tolist()
        if item_ordinals.max(initial=-1) >= 0
        else None
    )
    binds = {input_spec.bind for input_spec in spec.inputs}
    prepared_inputs: list[PreparedInput | InvalidInput | None] = []
    for row, source in enumerate(sources):
        history = known_indices[known_ends[row] : known_ends[row + 1]]
        dropped_count = ends[row + 1] - ends[row] - len(history)
        excluded_ordinals = excluded[excluded_ends[row] : excluded_ends[row + 1]]
        if len(excluded_ordinals) > history_limit:
            newest_indices = items.to_model(Ordinals(excluded_ordinals[-history_limit:]))
            history = newest_indices[newest_indices >= 0]
        item_index = -1
        if source.item is not None:
            item_index = -1 if own_indices is None else own_indices[row]
            excluded_ordinals = np.union1d(excluded_ordinals, [source.item])
        try:
            raw_features = source.features
            features = {} if raw_features is None else check_features(spec.features, raw_features)
        except InvalidInput as error:
            prepared_inputs.append(
                error.with_traceback(None)
            )  # which holds this list, and so itself
            continue
        is_usable = not (
            ("feature" in binds and source.features is None)
            or ("item_index" in binds and item_index < 0)
            or (binds == {"history"} and not len(history))
        )
        prepared_inputs.append(
            PreparedInput(table, history, features, item_index, excluded_ordinals, dropped_count)
            if is_usable
            else None
        )
    return prepared_inputs


def keep_last_occurrences(history: Sequence[bytes]) -> list[bytes]:
    """History with each item once, where it stood last, as the night groups its histories."""
    return list(dict.fromkeys(reversed(history)))[::-1]


def _drop_unknown(
    numbers: NDArray[np.int64], ends: Sequence[int]
) -> tuple[NDArray[np.int64], list[int]]:
    """The numbers that are not -1, and where each row of them ends."""
    is_known = numbers >= 0
    known_counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_known)])
    return numbers[is_known], known_counts[np.asarray(ends)].tolist()
