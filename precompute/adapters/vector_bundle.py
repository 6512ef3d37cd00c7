"""Bundle of a night whose items are a table of vectors, made from the table by the adapters' code."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.events.new_items import NEW_VECTOR_ABS_MAX
from cache.model.tower_spec import InputSpec
from precompute.adapters.folder import bundle_of
from precompute.adapters.inputs import ClickMatrix, NothingKnown, Vectors
from precompute.adapters.vectors import model_of
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import bundle_made_of
from precompute.config.settings import NightConfig
from precompute.events.files import counted_behind_number, newest_vector_by_item
from precompute.sources.columns import Ids, as_rows
from precompute.sources.erasures import NO_ERASURES, ErasedEntities, all_erasures
from precompute.sources.features import read_values
from precompute.sources.files import InputFiles, SourceFile, pin, source_file
from precompute.sources.readers import read_features, read_interactions
from precompute.sources.unusable import UnusableRows
from precompute.sources.vocabulary import Distinct, repeats_in

USERS_MAX = 20_000
"""Users, those with the lowest hashes, by whose vectors and clicks the fold is chosen: enough, and few to hold."""
SEED = 0x5DEECE66D
_NO_HASH_LIMIT = np.uint64(2**64 - 1)
"""Limit of hashes that leaves no user out."""


@contextmanager
def vector_bundle(
    config: NightConfig,
    inputs: str,
    files: InputFiles,
    *,
    interactions_before: datetime | None,
    cut: datetime,
) -> Iterator[Bundle]:
    """Yield the bundle of `sources.item_vectors`; one made from the same inputs, on any host, is reused.

    Interactions of `interactions_before` or later choose nothing. Items that events brought with a vector are in it, if
    these count in a night with this `cut`; erased items are not. Raises SourceError for an unusable table.
    """
    sources, store = config.sources, config.store()
    erased = ErasedEntities.of(all_erasures(store))
    hasher = hashlib.sha256(orjson.dumps(sources, option=orjson.OPT_SORT_KEYS))
    cut_text = (
        interactions_before.isoformat() if interactions_before and sources.interactions else ""
    )
    hasher.update(f"|{erased.digest(inputs)}|{cut_text}".encode())
    behind = counted_behind_number(config.events.keep_values_days, int(cut.timestamp()))
    vectors = newest_vector_by_item(files.events, behind)
    if event_vectors := {raw: vector for raw, vector in vectors.items() if raw not in erased.items}:
        hasher.update(
            orjson.dumps([(raw.decode(), vector) for raw, vector in event_vectors.items()])
        )
    make = partial(
        make_bundle,
        config,
        interactions_before=interactions_before,
        erased=erased,
        event_vectors=event_vectors,
        files=files.interactions,
    )
    with bundle_made_of(store, hasher.hexdigest(), make) as bundle:
        yield bundle


def make_bundle(
    config: NightConfig,
    folder: Path,
    *,
    interactions_before: datetime | None,
    erased: ErasedEntities = NO_ERASURES,
    event_vectors: Mapping[bytes, Sequence[float]] = MappingProxyType({}),
    files: Sequence[SourceFile] | None = None,
) -> Bundle:
    """Write the bundle of `sources.item_vectors` into a folder; the same tables make the same bytes.

    Items that are not in the table get the vectors in `event_vectors`, if these have as many numbers and none is far
    beyond the table's. Interactions are those that the sources name, unless their `files` are listed here. The bundle
    names the table of its items; without interactions, other vectors of users make no other bundle.
    """
    sources = config.sources
    items, limit = (
        _with_brought(_items(config, erased), event_vectors),
        _limit(config, interactions_before, files),
    )
    users = _users(config, items, limit, erased) if sources.user_vectors else None
    clicks, odd = None, list[str]()
    if sources.interactions:
        clicks, odd = _clicks(config, items, users, limit, interactions_before, erased, files)
    imported = model_of(items, users, clicks, metric=sources.vector_metric)
    if imported.share_by_chance is not None:
        odd.append(_chance_in_words(imported.share_by_chance))
    _, (table,) = pin([source_file(str(sources.item_vectors), config.path("."))])
    return bundle_of(imported, folder, item_vectors=table, **({"remarks": odd} if odd else {}))


def _chance_in_words(auc: float) -> str:
    return (
        f"what users clicked scores above a random item in {auc:.0%} of pairs, as by chance: if the vectors were "
        "fitted on such clicks, their ids and rows do not belong together; if the clicks are only to be left out of "
        "lists, all is well"
    )


def _items(config: NightConfig, erased: ErasedEntities) -> Vectors:
    """Read every row of the table; a hole in a catalogue could not be noticed later."""
    sources, unusable = config.sources, UnusableRows()
    path = source_file(str(sources.item_vectors), config.path("."))
    ids, rows = [], []
    for names, values in read_features(
        path,
        sources.item_column,
        (sources.vector_column,),
        source="item_vectors",
        unusable=unusable,
    ):
        ids.append(names.texts())
        rows.append(values[sources.vector_column])
    if not ids:
        raise SourceError(f"{path} has no rows: it names no item")
    if left_out := unusable.left_out("item_vectors"):
        raise SourceError(f"{path}: {left_out:,} rows have no id that can be used")
    try:
        item_vectors = Vectors.of(pa.chunked_array(ids), pa.chunked_array(rows), "item")
    except SourceError as error:
        raise SourceError(f"{path}: {error.message}", **error.details) from None
    erased_ids = pa.array([raw.decode() for raw in erased.items], pa.string())
    is_kept = as_rows(pc.invert(pc.is_in(item_vectors.ids, value_set=erased_ids)))
    return Vectors(item_vectors.ids.filter(pa.array(is_kept)), item_vectors.rows[is_kept])


def _with_brought(items: Vectors, event_vectors: Mapping[bytes, Sequence[float]]) -> Vectors:
    """Append to the table's rows those items that only events brought.

    Any caller can send events: a number beyond NEW_VECTOR_ABS_MAX, and beyond all of the table's, would spoil the fold
    and the lists.
    """
    max_magnitude = max(NEW_VECTOR_ABS_MAX, float(np.abs(items.rows).max(initial=0)))
    fitting = {
        raw.decode(): vector
        for raw, vector in event_vectors.items()
        if len(vector) == items.dims and max(map(abs, vector)) <= max_magnitude
    }
    ids_in_table = set(
        pc.filter(items.ids, pc.is_in(items.ids, pa.array(list(fitting), pa.string()))).to_pylist()
    )
    if not (new := {id_: vector for id_, vector in fitting.items() if id_ not in ids_in_table}):
        return items
    ids = pa.concat_arrays([items.ids, pa.array(list(new), items.ids.type)])
    return Vectors(ids, np.concatenate([items.rows, np.array(list(new.values()), np.float32)]))


def _limit(
    config: NightConfig, interactions_before: datetime | None, files: Sequence[SourceFile] | None
) -> np.uint64:
    """Return the highest of the USERS_MAX lowest hashes of users with vectors, else of users with interactions.

    _NO_HASH_LIMIT if there are fewer.
    """
    distinct_hashes = Distinct(USERS_MAX)
    if config.sources.user_vectors:
        for ids, _ in _user_vectors(config):
            distinct_hashes.add(ids.hashes(SEED))
    else:
        for batch in read_interactions(
            config.sources, Path(config.base), cutoff_at=interactions_before, files=files
        ):
            distinct_hashes.add(batch.users.hashes(SEED))
    return (
        np.uint64(distinct_hashes.smallest[-1])
        if len(distinct_hashes.smallest) == USERS_MAX
        else _NO_HASH_LIMIT
    )


def _user_vectors(config: NightConfig) -> Iterator[tuple[Ids, Any]]:
    sources = config.sources
    path, column = source_file(str(sources.user_vectors), config.path(".")), sources.vector_column
    for ids, values in read_features(
        path, sources.user_column, (column,), source="user_vectors", unusable=UnusableRows()
    ):
        yield ids, values[column]


def _users(
    config: NightConfig, items: Vectors, limit: np.uint64, erased: ErasedEntities
) -> Vectors:
    """Return vectors of some users; a user without a usable vector is left out, as in the night itself."""
    sources, dims = config.sources, items.dims
    spec = InputSpec("vector", "feature", "float32", column=sources.vector_column, width=dims)
    texts, rows = [pa.array([], pa.string())], [np.empty((0, dims), np.float32)]
    for ids, values in _user_vectors(config):
        feature_values = read_values(values, spec)
        is_kept = feature_values.usable & _below(ids, limit) & erased.keeps_users(ids)
        texts.append(ids.texts().filter(pa.array(is_kept)))
        rows.append(feature_values.numbers[is_kept])
    names, numbers = pa.concat_arrays(texts), np.concatenate(rows)
    if not len(names):
        raise SourceError(
            f"{sources.user_vectors}: no user has a vector of {dims} finite numbers, as many as those of "
            f"{sources.item_vectors} have"
        )
    first = np.ones(len(names), np.bool_)
    first[repeats_in(names)] = False
    return Vectors(names.filter(pa.array(first)), numbers[first])


def _clicks(
    config: NightConfig,
    items: Vectors,
    users: Vectors | None,
    limit: np.uint64,
    interactions_before: datetime | None,
    erased: ErasedEntities,
    files: Sequence[SourceFile] | None,
) -> tuple[ClickMatrix | None, list[str]]:
    """Return (clicks of some users before the cut, None without any to choose a fold by; remarks)."""
    sources = config.sources
    read = read_interactions(sources, Path(config.base), cutoff_at=interactions_before, files=files)
    batches = [batch.only(_below(batch.users, limit)) for batch in map(erased.leave_out, read)]
    if not sum(len(batch.times) for batch in batches):
        return None, []
    where = ", ".join(sources.interactions)
    try:
        known_user_ids = None if users is None else users.ids
        return ClickMatrix.read(batches, where, known_user_ids, items.ids), []
    except NothingKnown as error:
        # Of a sample of users none may have clicked; of everybody it is worth a word.
        return None, [error.message] if limit == _NO_HASH_LIMIT else []


def _below(ids: Ids, limit: np.uint64) -> NDArray[np.bool_]:
    return np.asarray((ids.hashes(SEED) <= limit)[ids.codes], np.bool_)
