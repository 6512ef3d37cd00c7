"""Skew: the night's records, read from Redis, compared with the live path's answers for the same entities."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.format.ids import FeatureValue, fingerprint
from cache.format.manifest import Table
from cache.model.agreement import SKEW_COSINE_RULE, SKEW_DEPTH, SKEW_RULE, overlap, row_cosines
from cache.model.input_preparation import LiveInput, PreparedInput
from cache.model.predictor import Predictor
from cache.model.tower_spec import TowerSpec
from cache.records import decode_record, is_absent
from precompute.gates.evidence.candidate import Candidate, Measurement, at_least, judgement, not_measured, worst_of
from precompute.gates.evidence.evidence import select_spread_rows
from precompute.partitions.shard_input import ShardInput
from precompute.scoring.towers import select_usable_inputs
from precompute.sources.columns import to_raw_ids

SKEW_SAMPLE: Final = 200

Pairs = list[tuple[bytes, bytes]]
"""Pairs of (stored record, live record), one per entity."""


@judgement(SKEW_RULE)
def skew(candidate: Candidate) -> Measurement:
    """Measure the mean overlap of the best 20 of stored and live lists, in the worst table of lists."""
    measure_name, threshold = f"top-{SKEW_DEPTH} overlap", candidate.thresholds.skew_overlap
    return _measure_agreement(candidate, ("topk", "similar"), measure_name, threshold)


@judgement(SKEW_COSINE_RULE)
def skew_cosine(candidate: Candidate) -> Measurement:
    """Measure the mean cosine of stored and live vectors and values, in the worst of their tables."""
    return _measure_agreement(candidate, ("tower", "value"), "cosine", candidate.thresholds.skew_cosine)


def _measure_agreement(
    candidate: Candidate, producer_kinds: tuple[str, ...], measure_name: str, threshold: float
) -> Measurement:
    tables = [table for table in candidate.manifest.tables.values() if table.producer.kind in producer_kinds]
    if not tables:
        return not_measured(threshold, "no table to compare")
    predictor = Predictor.open(candidate.manifest, candidate.root, candidate.items)
    figure_by_table, pair_count_by_table = {}, {}
    for table in tables:
        pairs, misplaced_id = _pair_records(candidate, predictor, table)
        if misplaced_id:
            note = f"a record of {table.name} belongs to another entity"
            return Measurement(False, misplaced_id, "its own record", note)
        if not pairs and _all_bring_vectors(candidate, table):
            continue
        if not pairs:
            return Measurement(False, None, threshold, f"no entity of {table.name} could be compared")
        figure_by_table[table.name] = (_overlap if table.kind == "topk" else _cosine)(table, pairs)
        pair_count_by_table[table.name] = len(pairs)
    if not figure_by_table:
        return not_measured(threshold, "all sampled users have vectors of the sources")
    worst_table, worst_figure = worst_of(figure_by_table)
    return at_least(
        worst_figure, threshold, f"{measure_name} of {pair_count_by_table[worst_table]} entities in {worst_table}"
    )


def _pair_records(candidate: Candidate, predictor: Predictor, table: Table) -> tuple[Pairs, str]:
    """Return the comparable pairs, and the id of an entity that has another entity's record, if any."""
    raw_ids, positions, prepared_inputs = _prepare_sample(candidate, predictor, table)
    prepared_rows = [row for row, prepared_input in enumerate(prepared_inputs) if prepared_input is not None]
    prepared_records = _read_stored_records(candidate, table, positions[prepared_rows])
    comparable_entities = [
        (row, record, prepared_input)
        for row, record in zip(prepared_rows, prepared_records, strict=True)
        if (prepared_input := prepared_inputs[row]) is not None and not is_absent(record, fingerprint(raw_ids[row]))
    ]
    comparable_rows, stored_records = (
        [row for row, _, _ in comparable_entities],
        [record for _, record, _ in comparable_entities],
    )
    fingerprints = [fingerprint(raw_ids[row]) for row in comparable_rows]
    live_inputs = [prepared_input for _, _, prepared_input in comparable_entities]
    live_records = predictor.predict(table.name, live_inputs, fingerprints, 0) if live_inputs else []
    for row, record, expected_fingerprint in zip(comparable_rows, stored_records, fingerprints, strict=True):
        if decode_record(table.layout, record).fingerprint != expected_fingerprint:
            return [], raw_ids[row].decode()
    return list(zip(stored_records, live_records, strict=True)), ""


def _all_bring_vectors(candidate: Candidate, table: Table) -> bool:
    """True if all sampled users have vectors of the sources, so that no answer of the tower can be compared."""
    evidence = candidate.evidence
    is_tower_table = table.producer.model == evidence.bundle.user_tower.name
    return is_tower_table and bool(evidence.users.users.has_vector.all())


def _prepare_sample(
    candidate: Candidate, predictor: Predictor, table: Table
) -> tuple[list[bytes], NDArray[np.int64], list[PreparedInput | None]]:
    """Return ids, positions and live inputs of the sampled entities."""
    evidence, items = candidate.evidence, candidate.items
    spec = TowerSpec.from_json(candidate.manifest.models[str(table.producer.model)].spec)
    if table.entity == "item":
        item_features = evidence.item_features(spec)
        usable = item_features.of(evidence.sampled_item_ordinals)[1]
        positions = select_spread_rows(evidence.sampled_item_ordinals[usable], SKEW_SAMPLE)
        columns_by_feature, _ = item_features.of(positions)
        live_inputs = [
            LiveInput(
                item_ordinal=row,
                features={
                    str(feature.column): _to_python_value(columns_by_feature[feature.name][index])
                    for feature in spec.features
                }
                or None,
            )
            for index, row in enumerate(positions.tolist())
        ]
        raw_ids = [items.raw_id(row) for row in positions.tolist()]
    else:
        users = evidence.users.users
        user_rows = select_usable_inputs(items, users, {table.name: spec})[0]
        if table.producer.model == evidence.bundle.user_tower.name:
            # Users with a vector of the sources were not answered by the tower.
            user_rows = user_rows[~users.has_vector[user_rows]]
        user_rows = select_spread_rows(user_rows, SKEW_SAMPLE)
        positions, raw_ids = (
            evidence.users.directory_positions[user_rows],
            to_raw_ids(users.entity_ids.take(user_rows)),
        )
        live_inputs = [
            LiveInput(
                history=tuple(
                    items.raw_id(ordinal)
                    for ordinal in users.history_ordinals[
                        users.history_indptr[row] : users.history_indptr[row + 1]
                    ].tolist()
                ),
                features={
                    str(feature.column): _feature_as_sent(users, str(feature.column), row) for feature in spec.features
                }
                or None,
            )
            for row in user_rows.tolist()
        ]
    return (raw_ids, positions, [predictor.prepare(table.name, live_input) for live_input in live_inputs])


def _feature_as_sent(users: ShardInput, feature_column: str, user_row: int) -> FeatureValue:
    """Return a user's feature as a caller would send it."""
    return _to_python_value(users.features[feature_column][user_row].as_py())


def _to_python_value(arrow_value: Any) -> FeatureValue:
    arrow_value = arrow_value.tolist() if isinstance(arrow_value, np.ndarray | np.generic) else arrow_value
    feature_value: FeatureValue = tuple(arrow_value) if isinstance(arrow_value, list) else arrow_value
    return feature_value


def _overlap(table: Table, pairs: Pairs) -> float:
    overlaps = []
    for stored_record, live_record in pairs:
        stored_items, live_items = (
            decode_record(table.layout, record).item_ordinals for record in (stored_record, live_record)
        )
        if stored_items is None or live_items is None:
            return float("nan")
        # For a user without remaining items, both lists are empty.
        depth = min(SKEW_DEPTH, max(len(stored_items), len(live_items)))
        overlaps.append(overlap(stored_items[:depth], live_items[:depth], depth))
    return float(np.mean(overlaps))


def _cosine(table: Table, pairs: Pairs) -> float:
    stored_numbers, live_numbers = (
        np.array([decode_record(table.layout, pair[pair_index]).numbers for pair in pairs]) for pair_index in (0, 1)
    )
    return float(row_cosines(stored_numbers, live_numbers).mean())


def _read_stored_records(candidate: Candidate, table: Table, directory_positions: NDArray[np.int64]) -> list[bytes]:
    directory, record_bytes = candidate.evidence.directories[table.entity], table.layout.size_bytes
    pipeline = candidate.control.client.pipeline(transaction=False)
    for position in directory_positions.tolist():
        page_number, offset = table.locate_record(*directory.locate_in_part(position))
        page_key = candidate.control.keyspace.page(candidate.manifest.generation, table.name, page_number)
        pipeline.getrange(page_key, offset, offset + record_bytes - 1)
    return list(pipeline.execute())
