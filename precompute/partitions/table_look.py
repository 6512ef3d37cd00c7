"""Look at the tables of a night before it begins: rows that it would leave out, and ids that one table has alone."""

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
from precompute.partitions.catalogue import (
    answered_by,
    feature_inputs,
    read_feature_items,
)
from precompute.partitions.partition import UNKNOWN_EXAMPLES, note_repeated_users
from precompute.partitions.shard_files import USER_VECTORS, read_stream, shard_paths
from precompute.partitions.shard_input import hashes_of
from precompute.partitions.user_tables import (
    USER_ROWS,
    VECTOR_ROWS,
    write_features,
    write_vectors,
)
from precompute.sources.columns import Ids, as_rows
from precompute.sources.features import NO_VALUES
from precompute.sources.files import source_file
from precompute.sources.id_forms import IdForms
from precompute.sources.plausibility import (
    catalogue_in_words,
    unanswered_in_words,
    unknown_in_words,
    unknown_item_share,
)
from precompute.sources.readers import Interactions, read_features, row_count
from precompute.sources.unusable import UnusableRows

ROWS_READ: Final = 2_000_000
"""Rows of interactions, and of a table, that are read; a night reads all."""


ALMOST_ALL: Final = 0.99
"""Share of interactions beyond which their users count as being in another form than those of a table."""


class TableLook(NamedTuple):
    """Remarks on the tables; `is_refused` if a night would be, for ids of another form than those of interactions."""

    remarks: list[str]
    is_refused: bool


def first_rows(
    interactions: Generator[Interactions, None, None],
) -> tuple[list[Interactions], bool]:
    """Return the batches of the first ROWS_READ rows, about, and True if these are all."""
    batches, rows = list[Interactions](), 0
    with closing(interactions) as read:
        for batch in read:
            if len(batch.times):
                batches.append(batch)
            rows += len(batch.times)
            if rows >= ROWS_READ:
                return batches, next(read, None) is None
    return batches, True


def look_at_tables(
    config: NightConfig,
    bundle: Bundle | None,
    batches: Sequence[Interactions],
    unusable: UnusableRows,
) -> TableLook:
    """Note the rows that the models cannot use, as the night counts them; return remarks on ids and on tables not read.

    `bundle` is None if there is none, or if the night makes it. Raises SourceError as the night does.
    """
    sources, remarks, is_refused = config.sources, list[str](), False
    tables = [("item", catalogue_in_words(sources), _item_ids(config, bundle, unusable, remarks))]
    if bundle is not None:
        tables += _user_ids(config, bundle, unusable, remarks)
    for kind, table, texts in tables:
        if texts is not None and batches:
            columns = [batch.items if kind == "item" else batch.users for batch in batches]
            share, unknown = _unknown(columns, texts)
            remarks += unknown_in_words(
                share, kind, table, unknown, texts[:UNKNOWN_EXAMPLES].to_pylist()
            )
            # Users without features get no answer, which refuses a night if there is nobody else.
            threshold = config.gates.unknown_items if kind == "item" else ALMOST_ALL
            is_refused |= share is not None and share > threshold
    return TableLook([*remarks, *_forms_in_words(batches, tables)], is_refused)


def _forms_in_words(
    batches: Sequence[Interactions], tables: Sequence[tuple[str, str, Any]]
) -> list[str]:
    """Return remarks on ids of several forms in interactions and tables."""
    forms = {"user": IdForms("user"), "item": IdForms("item")}
    for batch in batches:
        forms["user"].add(batch.users.names)
        forms["item"].add(batch.items.names)
    for kind, _, texts in tables:
        if texts is not None:
            forms[kind].add(texts)
    return [remark[0] for of_kind in forms.values() if (remark := of_kind.remark()) is not None]


def _is_read(config: NightConfig, table: str, remarks: list[str]) -> bool:
    rows = row_count(source_file(table, config.path(".")))
    if rows > ROWS_READ:
        remarks.append(f"{table} has {rows:,} rows, which only a night reads")
    return rows <= ROWS_READ


def _item_ids(
    config: NightConfig, bundle: Bundle | None, unusable: UnusableRows, remarks: list[str]
) -> Any:
    """Return the ids of the items that a night would know, None if they are not read."""
    sources = config.sources
    if table := sources.item_features:
        if not _is_read(config, table, remarks):
            return None
        models = () if bundle is None else bundle.models
        texts = read_feature_items(config, models, NO_VALUES, (), unusable)
        if bundle is None:
            return texts
        is_answered = answered_by(bundle, texts)
        answered = int(is_answered.sum())
        remarks += unanswered_in_words(answered, len(texts) - answered, table)
        return texts.filter(pa.array(is_answered))
    if table := sources.item_vectors:
        if not _is_read(config, table, remarks):
            return None
        path = source_file(table, config.path("."))
        read = read_features(path, sources.item_column, ())
        return pa.chunked_array([ids.texts() for ids, _ in read], pa.string())
    return None if bundle is None else bundle.vocabulary.texts


def _user_ids(
    config: NightConfig, bundle: Bundle, unusable: UnusableRows, remarks: list[str]
) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, table, ids) of the tables of users that the models take."""
    sources, inputs = config.sources, feature_inputs(bundle, "user")
    columns = sorted({str(input_spec.column) for input_spec in inputs})
    hash_names = partial(hashes_of, seed=0, hasher=hash_ids)
    one_shard = replace(config, shards=1)
    with TemporaryDirectory(prefix="larder-check-") as name:
        folder = Path(name)
        if columns and sources.user_features and _is_read(config, sources.user_features, remarks):
            write_features(
                one_shard,
                folder,
                hash_names,
                columns,
                inputs,
                unusable,
                lists=bundle.columns_of_lists,
            )
            users = _written_users(folder, "features", USER_ROWS, unusable)
            yield "user", sources.user_features, users
        if sources.user_vectors and _is_read(config, sources.user_vectors, remarks):
            write_vectors(one_shard, folder, bundle.dims, hash_names, unusable)
            users = _written_users(folder, USER_VECTORS, VECTOR_ROWS, unusable)
            yield "user", sources.user_vectors, users


def _written_users(folder: Path, kind: str, source: str, unusable: UnusableRows) -> Any:
    (path,) = shard_paths(folder, 0, (kind,))
    table = read_stream(path)
    note_repeated_users(source, table, unusable)
    return table.column("user")


def _unknown(columns: Sequence[Ids], texts: Any) -> tuple[float | None, list[str]]:
    """Return the share of rows whose id is not among the texts, None for too few, and examples of such ids."""
    rows = unknown_rows = 0
    examples: dict[str, None] = {}
    for ids in columns:
        is_unknown = ~as_rows(pc.is_in(ids.names, value_set=texts))
        rows += len(ids)
        unknown_rows += int(np.count_nonzero(is_unknown[ids.codes]))
        examples |= dict.fromkeys(
            ids.names.filter(pa.array(is_unknown))[:UNKNOWN_EXAMPLES].to_pylist()
        )
    return unknown_item_share(rows, unknown_rows, 0), list(examples)[:UNKNOWN_EXAMPLES]
