"""Preview of a night's tables before the night: rows that it would leave out, and ids that only one table has."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.format.ids import hash_ids
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig
from precompute.partitions.catalogue import answerable_item_mask, feature_inputs, read_feature_items
from precompute.partitions.partition import UNKNOWN_EXAMPLES_MAX, note_repeated_users
from precompute.partitions.shard_files import USER_VECTORS_KIND, read_stream, shard_paths
from precompute.partitions.shard_input import hash_id_rows
from precompute.partitions.user_tables import (
    USER_FEATURES_SOURCE,
    USER_VECTORS_SOURCE,
    write_feature_files,
    write_vector_files,
)
from precompute.sources.columns import Ids, as_numpy_mask
from precompute.sources.features import NO_ENTITY_VALUES
from precompute.sources.files import source_file
from precompute.sources.id_forms import IdForms
from precompute.sources.plausibility import (
    catalogue_in_words,
    items_without_vector_remarks,
    unknown_ids_remarks,
    unknown_item_share,
)
from precompute.sources.readers import Interactions, read_features, row_count
from precompute.sources.unusable import UnusableRows

LOOKED_ROWS_MAX: Final = 2_000_000
"""Rows of interactions, and of a table, that the preview reads; a night reads all rows."""


UNKNOWN_USERS_SHARE_MAX: Final = 0.99
"""Share of interactions with users unknown to a table, above which their ids count as having another form."""


class TableRemarks(NamedTuple):
    """Remarks on the tables; `is_refused` if a night would be refused because ids differ in form between tables."""

    remarks: list[str]
    is_refused: bool


def read_first_batches(interactions: Generator[Interactions, None, None]) -> tuple[list[Interactions], bool]:
    """Return the batches of about the first LOOKED_ROWS_MAX rows, and True if these are all rows."""
    batches, row_count = list[Interactions](), 0
    with closing(interactions) as closing_batches:
        for batch in closing_batches:
            if len(batch.times_us):
                batches.append(batch)
            row_count += len(batch.times_us)
            if row_count >= LOOKED_ROWS_MAX:
                return batches, next(closing_batches, None) is None
    return batches, True


def preview_tables(
    config: NightConfig, bundle: Bundle | None, batches: Sequence[Interactions], unusable_rows: UnusableRows
) -> TableRemarks:
    """Note the rows that the models cannot use, as a night does; return remarks on ids and on unread tables.

    `bundle` is None if there is none, or if the night trains it. Raises SourceError where the night would.
    """
    sources, remarks, is_refused = config.sources, list[str](), False
    id_tables = [("item", catalogue_in_words(sources), _read_item_ids(config, bundle, unusable_rows, remarks))]
    if bundle is not None:
        id_tables += _read_user_ids(config, bundle, unusable_rows, remarks)
    for entity_kind, table_name, id_texts in id_tables:
        if id_texts is not None and batches:
            id_columns = [batch.item_ids if entity_kind == "item" else batch.user_ids for batch in batches]
            unknown_share, unknown_examples = _unknown_share_and_examples(id_columns, id_texts)
            remarks += unknown_ids_remarks(
                unknown_share, entity_kind, table_name, unknown_examples, id_texts[:UNKNOWN_EXAMPLES_MAX].to_pylist()
            )
            # Users without features get no answer; if all users lack them, the night is refused.
            threshold = config.gates.unknown_items if entity_kind == "item" else UNKNOWN_USERS_SHARE_MAX
            is_refused |= unknown_share is not None and unknown_share > threshold
    return TableRemarks([*remarks, *_id_forms_remarks(batches, id_tables)], is_refused)


def _id_forms_remarks(batches: Sequence[Interactions], id_tables: Sequence[tuple[str, str, Any]]) -> list[str]:
    """Return remarks on ids that occur in several forms in interactions and tables."""
    forms_by_kind = {"user": IdForms("user"), "item": IdForms("item")}
    for batch in batches:
        forms_by_kind["user"].add(batch.user_ids.distinct_ids)
        forms_by_kind["item"].add(batch.item_ids.distinct_ids)
    for entity_kind, _, id_texts in id_tables:
        if id_texts is not None:
            forms_by_kind[entity_kind].add(id_texts)
    return [remark[0] for id_forms in forms_by_kind.values() if (remark := id_forms.remark()) is not None]


def _is_small_enough(config: NightConfig, table_file: str, remarks: list[str]) -> bool:
    table_rows = row_count(source_file(table_file, config.path(".")))
    if table_rows > LOOKED_ROWS_MAX:
        remarks.append(f"{table_file} has {table_rows:,} rows, so only a night reads it")
    return table_rows <= LOOKED_ROWS_MAX


def _read_item_ids(config: NightConfig, bundle: Bundle | None, unusable_rows: UnusableRows, remarks: list[str]) -> Any:
    """Return the ids of the items that a night would know; None if the table is not read."""
    sources = config.sources
    if table_file := sources.item_features:
        if not _is_small_enough(config, table_file, remarks):
            return None
        models = () if bundle is None else bundle.models
        item_ids = read_feature_items(config, models, NO_ENTITY_VALUES, (), unusable_rows)
        if bundle is None:
            return item_ids
        is_answered = answerable_item_mask(bundle, item_ids)
        answered_count = int(is_answered.sum())
        remarks += items_without_vector_remarks(answered_count, len(item_ids) - answered_count, table_file)
        return item_ids.filter(pa.array(is_answered))
    if table_file := sources.item_vectors:
        if not _is_small_enough(config, table_file, remarks):
            return None
        path = source_file(table_file, config.path("."))
        table_batches = read_features(path, sources.item_column, ())
        return pa.chunked_array([ids.row_texts() for ids, _ in table_batches], pa.string())
    return None if bundle is None else bundle.vocabulary.id_texts


def _read_user_ids(
    config: NightConfig, bundle: Bundle, unusable_rows: UnusableRows, remarks: list[str]
) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, table, ids) for each table of users that the models use."""
    sources, input_specs = config.sources, feature_inputs(bundle, "user")
    feature_columns = sorted({str(input_spec.column) for input_spec in input_specs})
    hash_names = partial(hash_id_rows, hash_seed=0, hasher=hash_ids)
    one_shard_config = replace(config, shards=1)
    with TemporaryDirectory(prefix="larder-check-") as temporary_name:
        folder = Path(temporary_name)
        if feature_columns and sources.user_features and _is_small_enough(config, sources.user_features, remarks):
            write_feature_files(
                one_shard_config,
                folder,
                hash_names,
                feature_columns,
                input_specs,
                unusable_rows,
                columns_of_lists=bundle.columns_of_lists,
            )
            user_ids = _read_written_users(folder, "features", USER_FEATURES_SOURCE, unusable_rows)
            yield "user", sources.user_features, user_ids
        if sources.user_vectors and _is_small_enough(config, sources.user_vectors, remarks):
            write_vector_files(one_shard_config, folder, bundle.dims, hash_names, unusable_rows)
            user_ids = _read_written_users(folder, USER_VECTORS_KIND, USER_VECTORS_SOURCE, unusable_rows)
            yield "user", sources.user_vectors, user_ids


def _read_written_users(folder: Path, file_kind: str, source_name: str, unusable_rows: UnusableRows) -> Any:
    (path,) = shard_paths(folder, 0, (file_kind,))
    user_table = read_stream(path)
    note_repeated_users(source_name, user_table, unusable_rows)
    return user_table.column("user")


def _unknown_share_and_examples(id_columns: Sequence[Ids], known_ids: Any) -> tuple[float | None, list[str]]:
    """Return the share of rows whose id is not in `known_ids`, None for too few rows, and examples of such ids."""
    row_count = unknown_rows = 0
    unknown_examples: dict[str, None] = {}
    for ids in id_columns:
        is_unknown = ~as_numpy_mask(pc.is_in(ids.distinct_ids, value_set=known_ids))
        row_count += len(ids)
        unknown_rows += int(np.count_nonzero(is_unknown[ids.id_codes]))
        unknown_examples |= dict.fromkeys(
            ids.distinct_ids.filter(pa.array(is_unknown))[:UNKNOWN_EXAMPLES_MAX].to_pylist()
        )
    return unknown_item_share(row_count, unknown_rows, 0), list(unknown_examples)[:UNKNOWN_EXAMPLES_MAX]
