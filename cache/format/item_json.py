"""Item ids as the bytes that answers carry, kept once they were asked for."""

from collections.abc import Callable, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.item_json_rows import ItemJsonRows
from cache.format.text_table import LONGEST

TEXTS_MAX = 1 << 18
"""Number of ids kept as text, about 25 MB; when it is exceeded, the cache is emptied and starts again."""


class ItemJsonTexts:
    """Each ordinal's id as a JSON string; `ids_of` reads those that are new.

    JSON of ids none of which is longer than `longest` bytes is kept at one width.
    """

    def __init__(
        self,
        count: int,
        ids_of: Callable[[NDArray[np.uint32]], Sequence[str]],
        longest: int | None = None,
    ) -> None:
        self._count = count
        self._ids_of = ids_of
        self._json_by_ordinal: NDArray[np.object_] | None = None
        self._is_known = np.zeros(0, np.bool_)
        self._cached_count = 0
        self._lines = None
        if longest is not None and longest <= LONGEST:
            self._lines = ItemJsonRows(count, longest, ids_of)

    def lines(self, ordinals: NDArray[np.uint32]) -> list[bytes]:
        """A comma-separated line of texts for each row of ordinals uint32[n, k]."""
        if self._lines is not None and (lines := self._lines.of(ordinals)) is not None:
            return lines
        return [b",".join(row) for row in self.rows(ordinals)]

    def rows(self, ordinals: NDArray[np.uint32]) -> list[list[bytes]]:
        """Texts[n][k] of ordinals uint32[n, k], all of them below the table's count."""
        json_by_ordinal = self._json_by_ordinal
        if json_by_ordinal is None:
            json_by_ordinal = self._json_by_ordinal = np.full(self._count, None, object)
            self._is_known = np.zeros(self._count, np.bool_)
        if not self._is_known[ordinals].all():
            self._read(json_by_ordinal, np.unique(ordinals))
        json_rows: list[list[bytes]] = json_by_ordinal[ordinals].tolist()
        if self._cached_count > TEXTS_MAX:
            self._json_by_ordinal, self._cached_count = None, 0
        return json_rows

    def _read(self, json_by_ordinal: NDArray[np.object_], ordinals: NDArray[np.uint32]) -> None:
        new = ordinals[~self._is_known[ordinals]]
        for ordinal, text in zip(new.tolist(), self._ids_of(new), strict=True):
            json_by_ordinal[ordinal] = orjson.dumps(text)
        self._is_known[new] = True
        self._cached_count += len(new)
