"""The answers of a batch as Arrow columns, one row per entity, in the order asked. Pure."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.manifest import Table
from serving.answer import Answer
from serving.arrow_schema import Field
from serving.arrow_write import (
    Column,
    fixed_lists,
    flags,
    lists,
    no_text,
    numbers,
    same_text,
    stream,
    texts,
    whole_texts,
)

TABLE = "table"
"""The schema's metadata: which table was asked."""

_NUMBER = Field("item", "f4")
_ORIGIN = (
    Field("source", "utf8"),
    Field("producer", "utf8", True),
    Field("generation", "utf8"),
    Field("age_seconds", "f8"),
    Field("published_at", "utf8"),
    Field("reason", "utf8", True),
    Field("live", "utf8", True),
    Field("dropped_history", "i4", True),
    Field("stale", "utf8", True),
)
_ITEMS = (
    Field("items", "list", False, Field("item", "utf8")),
    Field("scores", "list", False, _NUMBER),
    Field("short", "bool"),
)
_LABELS = Field("labels", "list", False, Field("item", "utf8"))

Origin = tuple[Any, ...]
"""Values of the origin's columns in one row."""


class Stored(NamedTuple):
    """Rows that stand as plain records: scores of whole lists, vectors or values float32[n, width]."""

    places: NDArray[np.int64]
    origins: Sequence[Origin]
    numbers: NDArray[np.float32]
    items: Sequence[Sequence[bytes]]
    """The ids of each list, if it is one, and their bytes int32[n, width]."""
    sizes: NDArray[np.int32]


_NOTHING = Stored(
    np.zeros(0, np.int64), (), np.zeros((0, 0), np.float32), (), np.zeros((0, 0), np.int32)
)


def answers_stream(
    table: Table,
    ids: Sequence[bytes | None],
    answers: Mapping[int, Answer],
    stored: Stored = _NOTHING,
) -> bytes:
    """The body of the response: row i is one of `stored`, or else `answers[i]`."""
    rows = len(ids)
    if answers:
        origins: list[Origin] = [()] * rows
        for place, origin in zip(stored.places.tolist(), stored.origins, strict=True):
            origins[place] = origin
        for place, answer in answers.items():
            origins[place] = origin_of(answer)
    else:
        origins = list(stored.origins)
    columns = [texts(ids)]
    for field, values in zip(_ORIGIN, zip(*origins, strict=True), strict=True):
        columns.append(_column(field, values))
    fields: tuple[Field, ...]
    if table.kind == "topk":
        fields = _ITEMS
        columns += _top_columns(rows, answers, stored)
    else:
        name = "vector" if table.kind == "vector" else "values"
        field, column = _vectors(name, rows, answers, stored, table.layout.width)
        fields, columns = (field,), [*columns, column]
        if name == "values":
            fields = (*fields, _LABELS)
            own = table.labels
            listed = [
                answers[place]["labels"] if place in answers else own for place in range(rows)
            ]
            columns.append(_text_lists(listed))
    metadata = ((TABLE, table.name),)
    return stream((Field("id", "utf8", True), *_ORIGIN, *fields), columns, rows, metadata)


def origin_of(answer: Answer) -> Origin:
    """Its row in the origin's columns."""
    return tuple([answer.get(field.name) for field in _ORIGIN])


def _column(field: Field, values: Sequence[Any]) -> Column:
    first, rows = values[0], len(values)
    if field.kind == "utf8":
        if values.count(first) == rows:
            return no_text(rows) if first is None else same_text(first.encode(), rows)
        return texts([None if each is None else each.encode() for each in values])
    if field.kind == "f8":
        return numbers(np.array(values, np.float64))
    there = [each is not None for each in values]
    return numbers(np.array([each or 0 for each in values], np.int32), there)


def _top_columns(
    rows: int, answers: Mapping[int, Answer], stored: Stored
) -> tuple[Column, Column, Column]:
    if not answers:
        count, width = stored.numbers.shape
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
        column = _names(itertools.chain.from_iterable(stored.items), stored.sizes.ravel())
        scores = numbers(stored.numbers.ravel())
        return lists(ends, column), lists(ends, scores), flags([False] * rows)
    width, short = stored.numbers.shape[1], [False] * rows
    items: list[Sequence[bytes]] = [()] * rows
    counts = np.zeros(rows, np.int32)
    counts[stored.places] = width
    for place, listed in zip(stored.places.tolist(), stored.items, strict=True):
        items[place] = listed
    for place, answer in answers.items():
        items[place] = [each.encode() for each in answer["items"]]
        counts[place], short[place] = len(items[place]), answer["short"]
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    sizes, flat = np.empty(ends[-1], np.int32), np.empty(ends[-1], np.float32)
    slots = ends[stored.places][:, None] + np.arange(width, dtype=np.int32)
    sizes[slots], flat[slots] = stored.sizes, stored.numbers
    for place, answer in answers.items():
        own = slice(ends[place], ends[place + 1])
        sizes[own], flat[own] = list(map(len, items[place])), answer["scores"]
    column = _names(itertools.chain.from_iterable(items), sizes)
    return lists(ends, column), lists(ends, numbers(flat)), flags(short)


def _names(names: Iterable[bytes], sizes: NDArray[np.int32]) -> Column:
    """utf8 whose sizes are known."""
    cuts = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=cuts[1:])
    return Column(((len(sizes), 0),), (b"", cuts.tobytes(), b"".join(names)))


def _vectors(
    name: str, rows: int, answers: Mapping[int, Answer], stored: Stored, width: int
) -> tuple[Field, Column]:
    """Of the table's width; where another night's answers have another, lists of any size."""
    values: list[NDArray[np.float32] | None] = [None] * rows
    for place, vector in zip(stored.places.tolist(), stored.numbers, strict=True):
        values[place] = vector
    for place, answer in answers.items():
        values[place] = answer[name]
    there = [each is not None for each in values]
    present = [each for each in values if each is not None]
    if all(len(each) == width for each in present):
        whole = np.zeros((rows, width), np.float32)
        if present:
            whole[np.flatnonzero(there)] = present
        field = Field(name, "fixed", True, _NUMBER, width)
        return field, fixed_lists(rows, numbers(whole.ravel()), there)
    sizes = [0 if each is None else len(each) for each in values]
    flat = np.concatenate(present)
    return Field(name, "list", True, _NUMBER), lists(_ends(sizes), numbers(flat), there)


def _text_lists(values: Sequence[Sequence[str]]) -> Column:
    flat = [each.encode() for each in itertools.chain.from_iterable(values)]
    return lists(_ends([len(each) for each in values]), whole_texts(flat))


def _ends(sizes: Sequence[int]) -> NDArray[np.int32]:
    return np.fromiter(itertools.accumulate(sizes, initial=0), np.int32, len(sizes) + 1)
