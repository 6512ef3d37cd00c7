"""Bundle of a night whose items are a table of vectors, made from that table."""

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
from cache.store.erasures import all_erasures
from precompute.adapters.folder import write_model_bundle
from precompute.adapters.inputs import ClickMatrix, EntityVectors, NoKnownClicks
from precompute.adapters.vectors import fold_vectors_model
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import bundle_made_of
from precompute.config.settings import NightConfig
from precompute.events.files import counted_behind_number, newest_vector_by_item
from precompute.sources.columns import Ids, as_numpy_mask
from precompute.sources.erasures import NO_ERASURES, ErasedEntities
from precompute.sources.features import read_feature_values
from precompute.sources.files import InputFiles, SourceFile, digest_files, source_file
from precompute.sources.readers import read_features, read_interactions
from precompute.sources.unusable import UnusableRows
from precompute.sources.vocabulary import DistinctCounter, repeated_text_rows

FOLD_USERS_MAX = 20_000
"""Number of users (with the lowest hashes) whose vectors and clicks choose the fold: enough to choose by, few to hold.
"""
USER_HASH_SEED = 0x5DEECE66D
_NO_HASH_LIMIT = np.uint64(2**64 - 1)
"""Limit of hashes that includes all users."""


@contextmanager
def vector_bundle(
    config: NightConfig,
    inputs_digest: str,
    input_files: InputFiles,
    *,
    interactions_before: datetime | None,
    cut: datetime,
) -> Iterator[Bundle]:
    """Yield the bundle of `sources.item_vectors`; a bundle that any host made from the same inputs is reused.

    Only interactions before `interactions_before` choose the fold. Items whose vectors came with events are included,
    if these events count in a night with this `cut`; erased items are not. Raises SourceError for an unusable table.
    """
    sources, store = config.sources, config.store()
    erased = ErasedEntities.of(all_erasures(store))
    digest_hasher = hashlib.sha256(orjson.dumps(sources, option=orjson.OPT_SORT_KEYS))
    cut_text = interactions_before.isoformat() if interactions_before and sources.interactions else ""
    digest_hasher.update(f"|{erased.digest(inputs_digest)}|{cut_text}".encode())
    counted_position = counted_behind_number(config.events.keep_values_days, int(cut.timestamp()))
    brought_vector_by_id = newest_vector_by_item(input_files.event_files, counted_position)
    if event_vectors := {raw: vector for raw, vector in brought_vector_by_id.items() if raw not in erased.items}:
        digest_hasher.update(orjson.dumps([(raw.decode(), vector) for raw, vector in event_vectors.items()]))
    make_bundle = partial(
        make_vector_bundle,
        config,
        interactions_before=interactions_before,
        erased=erased,
        event_vectors=event_vectors,
        interaction_files=input_files.interaction_files,
    )
    with bundle_made_of(store, digest_hasher.hexdigest(), make_bundle) as bundle:
        yield bundle


def make_vector_bundle(
    config: NightConfig,
    bundle_folder: Path,
    *,
    interactions_before: datetime | None,
    erased: ErasedEntities = NO_ERASURES,
    event_vectors: Mapping[bytes, Sequence[float]] = MappingProxyType({}),
    interaction_files: Sequence[SourceFile] | None = None,
) -> Bundle:
    """Write the bundle of `sources.item_vectors` into a folder; the same tables give the same bytes.

    Items that are missing from the table get their vectors from `event_vectors`, unless these have another length or
    numbers far beyond the table's. Interactions are those that the sources name, or those of `interaction_files`. The
    bundle names the table of its items. Without interactions, other vectors of users do not change the bundle.
    """
    sources = config.sources
    item_vectors, hash_limit = (
        _with_event_vectors(_read_item_vectors(config, erased), event_vectors),
        _user_hash_limit(config, interactions_before, interaction_files),
    )
    user_vectors = _sample_user_vectors(config, item_vectors, hash_limit, erased) if sources.user_vectors else None
    clicks, odd_remarks = None, list[str]()
    if sources.interactions:
        clicks, odd_remarks = _read_clicks(
            config, item_vectors, user_vectors, hash_limit, interactions_before, erased, interaction_files
        )
    imported = fold_vectors_model(item_vectors, user_vectors, clicks, metric=sources.vector_metric)
    if imported.share_by_chance is not None:
        odd_remarks.append(_chance_remark(imported.share_by_chance))
    _, (table_entry,) = digest_files([source_file(str(sources.item_vectors), config.path("."))])
    return write_model_bundle(
        imported, bundle_folder, item_vectors=table_entry, **({"remarks": odd_remarks} if odd_remarks else {})
    )


def _chance_remark(share_above_random: float) -> str:
    return (
        f"clicked items score above a random item in {share_above_random:.0%} of pairs, as by chance: if the "
        "vectors were fitted on "
        "such clicks, their ids and rows do not belong together; if the clicks are only to be left out of lists, "
        "nothing is wrong"
    )


def _read_item_vectors(config: NightConfig, erased: ErasedEntities) -> EntityVectors:
    """Read all rows of the table; raise SourceError for an unusable one: a missing item would go unnoticed."""
    sources, unusable = config.sources, UnusableRows()
    path = source_file(str(sources.item_vectors), config.path("."))
    id_chunks, vector_chunks = [], []
    for batch_ids, column_by_name in read_features(
        path, sources.item_column, (sources.vector_column,), source_name="item_vectors", unusable_rows=unusable
    ):
        id_chunks.append(batch_ids.row_texts())
        vector_chunks.append(column_by_name[sources.vector_column])
    if not id_chunks:
        raise SourceError(f"{path} has no rows: it names no item")
    if left_out := unusable.left_out("item_vectors"):
        raise SourceError(f"{path}: {left_out:,} rows have no usable id")
    try:
        item_vectors = EntityVectors.of(pa.chunked_array(id_chunks), pa.chunked_array(vector_chunks), "item")
    except SourceError as error:
        raise SourceError(f"{path}: {error.message}", **error.details) from None
    erased_ids = pa.array([raw.decode() for raw in erased.items], pa.string())
    is_kept = as_numpy_mask(pc.invert(pc.is_in(item_vectors.entity_ids, value_set=erased_ids)))
    return EntityVectors(item_vectors.entity_ids.filter(pa.array(is_kept)), item_vectors.vectors[is_kept])


def _with_event_vectors(item_vectors: EntityVectors, event_vectors: Mapping[bytes, Sequence[float]]) -> EntityVectors:
    """Append the vectors of items that are only known from events.

    Any caller can send events: a vector with a number beyond both NEW_VECTOR_ABS_MAX and the table's largest would
    distort the fold and the lists, so it is left out, as is a vector of another length.
    """
    magnitude_max = max(NEW_VECTOR_ABS_MAX, float(np.abs(item_vectors.vectors).max(initial=0)))
    fitting_vectors = {
        raw.decode(): vector
        for raw, vector in event_vectors.items()
        if len(vector) == item_vectors.dims and max(map(abs, vector)) <= magnitude_max
    }
    ids_in_table = set(
        pc.filter(
            item_vectors.entity_ids, pc.is_in(item_vectors.entity_ids, pa.array(list(fitting_vectors), pa.string()))
        ).to_pylist()
    )
    if not (new_vectors := {id_: vector for id_, vector in fitting_vectors.items() if id_ not in ids_in_table}):
        return item_vectors
    all_item_ids = pa.concat_arrays(
        [item_vectors.entity_ids, pa.array(list(new_vectors), item_vectors.entity_ids.type)]
    )
    return EntityVectors(
        all_item_ids, np.concatenate([item_vectors.vectors, np.array(list(new_vectors.values()), np.float32)])
    )


def _user_hash_limit(
    config: NightConfig, interactions_before: datetime | None, interaction_files: Sequence[SourceFile] | None
) -> np.uint64:
    """Return the highest of the FOLD_USERS_MAX lowest hashes of users with vectors, else of users with interactions.

    Returns _NO_HASH_LIMIT if there are fewer users.
    """
    distinct_hashes = DistinctCounter(FOLD_USERS_MAX)
    if config.sources.user_vectors:
        for ids, _ in _read_user_vectors(config):
            distinct_hashes.add(ids.distinct_hashes(USER_HASH_SEED))
    else:
        for batch in read_interactions(
            config.sources, Path(config.base), cutoff_at=interactions_before, interaction_files=interaction_files
        ):
            distinct_hashes.add(batch.user_ids.distinct_hashes(USER_HASH_SEED))
    return (
        np.uint64(distinct_hashes.smallest_hashes[-1])
        if len(distinct_hashes.smallest_hashes) == FOLD_USERS_MAX
        else _NO_HASH_LIMIT
    )


def _read_user_vectors(config: NightConfig) -> Iterator[tuple[Ids, Any]]:
    sources = config.sources
    path, column = source_file(str(sources.user_vectors), config.path(".")), sources.vector_column
    for ids, column_by_name in read_features(
        path, sources.user_column, (column,), source_name="user_vectors", unusable_rows=UnusableRows()
    ):
        yield ids, column_by_name[column]


def _sample_user_vectors(
    config: NightConfig, item_vectors: EntityVectors, hash_limit: np.uint64, erased: ErasedEntities
) -> EntityVectors:
    """Return vectors of some users; users without a usable vector are left out, as in the night itself."""
    sources, dims = config.sources, item_vectors.dims
    spec = InputSpec("vector", "feature", "float32", column=sources.vector_column, width=dims)
    id_parts, vector_parts = [pa.array([], pa.string())], [np.empty((0, dims), np.float32)]
    for ids, vector_column in _read_user_vectors(config):
        feature_values = read_feature_values(vector_column, spec)
        is_kept = feature_values.usable_mask & _below_limit_mask(ids, hash_limit) & erased.kept_users_mask(ids)
        id_parts.append(ids.row_texts().filter(pa.array(is_kept)))
        vector_parts.append(feature_values.input_numbers[is_kept])
    user_names, numbers = pa.concat_arrays(id_parts), np.concatenate(vector_parts)
    if not len(user_names):
        raise SourceError(
            f"{sources.user_vectors}: no user has a vector of {dims} finite numbers, the length of the vectors of "
            f"{sources.item_vectors}"
        )
    is_first_row = np.ones(len(user_names), np.bool_)
    is_first_row[repeated_text_rows(user_names)] = False
    return EntityVectors(user_names.filter(pa.array(is_first_row)), numbers[is_first_row])


def _read_clicks(
    config: NightConfig,
    item_vectors: EntityVectors,
    user_vectors: EntityVectors | None,
    hash_limit: np.uint64,
    interactions_before: datetime | None,
    erased: ErasedEntities,
    interaction_files: Sequence[SourceFile] | None,
) -> tuple[ClickMatrix | None, list[str]]:
    """Return (clicks of some users before the cut, or None without any to choose a fold by; remarks)."""
    sources = config.sources
    all_batches = read_interactions(
        sources, Path(config.base), cutoff_at=interactions_before, interaction_files=interaction_files
    )
    batches = [
        batch.only(_below_limit_mask(batch.user_ids, hash_limit)) for batch in map(erased.leave_out, all_batches)
    ]
    if not sum(len(batch.times_us) for batch in batches):
        return None, []
    files_text = ", ".join(sources.interactions)
    try:
        known_user_ids = None if user_vectors is None else user_vectors.entity_ids
        return ClickMatrix.read(batches, files_text, known_user_ids, item_vectors.entity_ids), []
    except NoKnownClicks as error:
        # In a sample of users there may be no known click; if there is none of any user, that is worth a remark.
        return None, [error.message] if hash_limit == _NO_HASH_LIMIT else []


def _below_limit_mask(user_ids: Ids, hash_limit: np.uint64) -> NDArray[np.bool_]:
    return np.asarray((user_ids.distinct_hashes(USER_HASH_SEED) <= hash_limit)[user_ids.id_codes], np.bool_)
