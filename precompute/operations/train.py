"""Training the reference bundle from the configured sources."""

import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.errors import ConfigError, SourceError
from precompute.bundles.bundle_store import hand_over
from precompute.bundles.bundle_swap import put_in_place
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig, parse_time
from precompute.erasures.erasure import ErasedEntities, all_erasures
from precompute.reference.spectral import SpectralShape
from precompute.reference.train import ReferenceData, train
from precompute.sources.columns import Ids
from precompute.sources.files import source_file
from precompute.sources.interactions import HashedIds, NumberedIds
from precompute.sources.plausibility import LEAST_ITEMS, LEAST_USERS, demand_least
from precompute.sources.readers import feature_schema, read_features, read_interactions
from precompute.sources.vocabulary import Vocabulary, as_strings

UNKNOWN = "unknown"
"""Category of an item that has none."""


def train_reference(
    config: NightConfig, *, data_until: str | None = None, progress: Progress = quiet
) -> dict[str, Any]:
    """Train on all interactions and put the bundle where the night reads it.

    With `data_until`, else that of the settings, only on older ones: what the night is judged by is not learnt.
    """
    started = time.perf_counter()
    if not config.sources.interactions:
        raise ConfigError("sources.interactions is empty: name the files to train on")
    users, items, times, rows = HashedIds(), NumberedIds(), [], 0
    data_until = data_until or config.data_until
    cutoff_at = parse_time(data_until) if data_until else None
    erased = ErasedEntities.of(all_erasures(config.store()))
    read = read_interactions(config.sources, Path(config.base), cutoff_at=cutoff_at)
    for batch in map(erased.leave_out, read):
        users.add(batch.users)
        items.add(batch.items)
        times.append(batch.times)
        rows += len(batch.times)
        progress("read interactions", rows, 0)
    if not rows:
        raise SourceError("the sources hold no interaction to train on")
    user_rows, user_count = users.codes()
    item_rows, item_ids = items.codes(), items.names
    demand_least(user_count, len(item_ids))
    last_item = np.empty(user_count, np.int64)
    last_item[user_rows] = item_rows
    categories = _categories(config, item_ids)
    if categories is None and (last_item[user_rows] == item_rows).all():
        raise SourceError(
            f"too little data: each of the {user_count:,} users has one item, so no item is like another; at least "
            f"{LEAST_USERS} users need {LEAST_ITEMS} items or more. Is the right column named for users?",
            users=user_count,
            items=len(item_ids),
        )
    when = np.concatenate(times)
    is_timed = bool((when != when[0]).any())
    data = ReferenceData(user_rows, item_rows, item_ids, categories, when if is_timed else None)
    target = config.path(config.bundle)
    staging_folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        reference_config = config.reference
        bundle = train(
            data, staging_folder, dims=reference_config.dims, seed=reference_config.seed,
            programs=reference_config.programs,
            shape=None if reference_config.choose else SpectralShape(), progress=progress,
        )  # fmt: skip
        hand_over(config.store(), bundle)
        put_in_place(staging_folder, target)
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
    progress("train", 1, 1)
    return {
        **bundle.training,
        "bundle": str(target),
        "digest": bundle.digest,
        "users": user_count,
        "items": len(item_ids),
        "interactions": rows,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _categories(config: NightConfig, item_ids: Any) -> Any:
    """Category of each item from the item features, as Arrow strings; None where they have no such column."""
    sources, column = config.sources, config.sources.category_column
    if not sources.item_features:
        return None
    path = source_file(sources.item_features, config.path("."))
    if column not in feature_schema(path).names:
        return None
    vocabulary = Vocabulary.of(as_strings(pa.chunked_array([item_ids])))
    assert vocabulary is not None  # noqa: S101 - each id was numbered once
    named, row_parts = NumberedIds(), [np.empty(0, np.int64)]
    for ids, columns in read_features(path, sources.item_column, (column,)):
        texts = pc.fill_null(columns[column].cast(pa.string()), "")
        named.add(Ids.of(texts))
        row_parts.append(vocabulary.find_positions(ids.texts()))
    codes, rows = named.codes(), np.concatenate(row_parts)
    category_codes = np.full(len(item_ids), -1, np.int64)
    matched_indexes = np.flatnonzero(rows >= 0)[::-1]  # of an item that comes twice, its first row
    category_codes[rows[matched_indexes]] = codes[matched_indexes]
    texts = pc.fill_null(named.names.take(pa.array(category_codes, mask=category_codes < 0)), "")
    return pc.if_else(pc.equal(texts, ""), pa.scalar(UNKNOWN, texts.type), texts)
