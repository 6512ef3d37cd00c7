"""The answers of a batch as Arrow columns, one row per entity, in the order asked. Pure."""

import itertools
from collections.abc import Mapping, Sequence
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
_NO_NUMBERS = np.zeros(0, np.float32)

Origin = tuple[Any, ...]
"""Values of the origin's columns in one row."""


class Lists(NamedTuple):
    """Stored lists of k items each, none of them short, for rows `places`."""

    places: NDArray[np.intp]
    origins: Sequence[Origin]
    texts: NDArray[np.object_]
    """bytes[n, k]: the items' ids."""
    sizes: NDArray[np.int32]
    """Bytes of each id, [n, k]."""
    scores: NDArray[np.float32]


def answers_stream(
    table: Table,
    ids: Sequence[bytes | None],
    answers: Mapping[int, Answer],
    stored: Sequence[Lists] = (),
) -> bytes:
    """The body of the response: row i is of `answers[i]`, or else in one of `stored`."""
    rows = len(ids)
    origins: list[Origin] = [()] * rows
    for block in stored:
        for place, origin in zip(block.places.tolist(), block.origins, strict=True):
            origins[place] = origin
    for place, answer in answers.items():
        origins[place] = origin_of(answer)
    columns = [texts(ids)]
    for field, values in zip(_ORIGIN, zip(*origins, strict=True), strict=True):
        columns.append(_column(field, values))
    fields: tuple[Field, ...]
    if table.kind == "topk":
        fields = _ITEMS
        columns += _top_columns(rows, answers, stored)
    else:
        name = "vector" if table.kind == "vector" else "values"
        listed = [answers[place] for place in range(rows)]
        field, column = _vectors(name, [each[name] for each in listed], table.layout.width)
        fields, columns = (field,), [*columns, column]
        if name == "values":
            fields = (*fields, _LABELS)
            columns.append(_text_lists([each["labels"] for each in listed]))
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
    rows: int, answers: Mapping[int, Answer], stored: Sequence[Lists]
) -> tuple[Column, Column, Column]:
    counts, short = np.zeros(rows, np.int32), np.zeros(rows, np.bool_)
    for block in stored:
        counts[block.places] = block.texts.shape[1]
    for place, answer in answers.items():
        counts[place], short[place] = len(answer["items"]), answer["short"]
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    total = int(ends[-1])
    ids = np.empty(total, object)
    sizes, scores = np.empty(total, np.int32), np.empty(total, np.float32)
    for block in stored:
        slots = ends[block.places][:, None] + np.arange(block.texts.shape[1], dtype=np.int32)
        ids[slots], sizes[slots], scores[slots] = block.texts, block.sizes, block.scores
    for place, answer in answers.items():
        own = slice(ends[place], ends[place + 1])
        raws = [each.encode() for each in answer["items"]]
        ids[own], sizes[own], scores[own] = raws, list(map(len, raws)), answer["scores"]
    cuts = np.zeros(total + 1, np.int32)
    np.cumsum(sizes, out=cuts[1:])
    named = Column(((total, 0),), (b"", cuts.tobytes(), b"".join(ids.tolist())))
    return lists(ends, named), lists(ends, numbers(scores)), flags(short.tolist())


def _vectors(
    name: str, values: Sequence[NDArray[np.float32] | None], width: int
) -> tuple[Field, Column]:
    """Of the table's width; where another night's answers have another, lists of any size."""
    there = [each is not None for each in values]
    rows, present = len(values), [each for each in values if each is not None]
    if all(len(each) == width for each in present):
        whole = np.zeros((rows, width), np.float32)
        if present:
            whole[np.flatnonzero(there)] = present
        field = Field(name, "fixed", True, _NUMBER, width)
        return field, fixed_lists(rows, numbers(whole.ravel()), there)
    sizes = [0 if each is None else len(each) for each in values]
    flat = np.concatenate([_NO_NUMBERS, *present])
    return Field(name, "list", True, _NUMBER), lists(_ends(sizes), numbers(flat), there)


def _text_lists(values: Sequence[Sequence[str]]) -> Column:
    flat = [each.encode() for each in itertools.chain.from_iterable(values)]
    return lists(_ends([len(each) for each in values]), whole_texts(flat))


def _ends(sizes: Sequence[int]) -> NDArray[np.int32]:
    return np.fromiter(itertools.accumulate(sizes, initial=0), np.int32, len(sizes) + 1)
