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
from precompute.gates.evidence.candidate import (
    Candidate,
    Measurement,
    at_least,
    judgement,
    not_measured,
    worst_of,
)
from precompute.gates.evidence.evidence import select_spread_rows
from precompute.partitions.shard_input import ShardInput
from precompute.scoring.towers import usable_inputs
from precompute.sources.columns import to_raw_ids

SKEW_SAMPLE: Final = 200

Pairs = list[tuple[bytes, bytes]]
"""Pairs of (stored record, live record), one per entity."""


@judgement(SKEW_RULE)
def skew(candidate: Candidate) -> Measurement:
    """Measure the mean overlap of the best 20 of stored and live lists, in the worst table of lists."""
    measure_name, threshold = f"top-{SKEW_DEPTH} overlap", candidate.thresholds.skew_overlap
    return _compared(candidate, ("topk", "similar"), measure_name, threshold)


@judgement(SKEW_COSINE_RULE)
def skew_cosine(candidate: Candidate) -> Measurement:
    """Measure the mean cosine of stored and live vectors and values, in the worst of their tables."""
    return _compared(candidate, ("tower", "value"), "cosine", candidate.thresholds.skew_cosine)


def _compared(
    candidate: Candidate, kinds: tuple[str, ...], measure_name: str, threshold: float
) -> Measurement:
    tables = [table for table in candidate.manifest.tables.values() if table.producer.kind in kinds]
    if not tables:
        return not_measured(threshold, "no table to compare")
    predictor = Predictor.open(candidate.manifest, candidate.root, candidate.items)
    figures, counts = {}, {}
    for table in tables:
        pairs, strange = _pairs(candidate, predictor, table)
        if strange:
            note = f"a record of {table.name} belongs to another entity"
            return Measurement(False, strange, "its own record", note)
        if not pairs and _all_bring_vectors(candidate, table):
            continue
        if not pairs:
            return Measurement(
                False, None, threshold, f"no entity of {table.name} could be compared"
            )
        figures[table.name] = (_overlap if table.kind == "topk" else _cosine)(table, pairs)
        counts[table.name] = len(pairs)
    if not figures:
        return not_measured(threshold, "all sampled users were given with their vectors")
    named, worst = worst_of(figures)
    return at_least(worst, threshold, f"{measure_name} of {counts[named]} entities in {named}")


def _pairs(candidate: Candidate, predictor: Predictor, table: Table) -> tuple[Pairs, str]:
    """Return the comparable pairs, and the id of an entity with another entity's record, if any."""
    raws, positions, prepared = _prepare_sample(candidate, predictor, table)
    rows = [row for row, prepared_input in enumerate(prepared) if prepared_input is not None]
    read = _read(candidate, table, positions[rows])
    comparable_entities = [
        (row, record, prepared_input)
        for row, record in zip(rows, read, strict=True)
        if (prepared_input := prepared[row]) is not None
        and not is_absent(record, fingerprint(raws[row]))
    ]
    usable, stored_records = (
        [row for row, _, _ in comparable_entities],
        [record for _, record, _ in comparable_entities],
    )
    fingerprints = [fingerprint(raws[row]) for row in usable]
    batch = [prepared_input for _, _, prepared_input in comparable_entities]
    live = predictor.predict(table.name, batch, fingerprints, 0) if batch else []
    for row, record, expected_fingerprint in zip(usable, stored_records, fingerprints, strict=True):
        if decode_record(table.layout, record).fingerprint != expected_fingerprint:
            return [], raws[row].decode()
    return list(zip(stored_records, live, strict=True)), ""


def _all_bring_vectors(candidate: Candidate, table: Table) -> bool:
    """True if no sampled user's answer is the tower's, so that there is nothing to compare."""
    evidence = candidate.evidence
    is_towers = table.producer.model == evidence.bundle.user_tower.name
    return is_towers and bool(evidence.users.users.has_vector.all())


def _prepare_sample(
    candidate: Candidate, predictor: Predictor, table: Table
) -> tuple[list[bytes], NDArray[np.int64], list[PreparedInput | None]]:
    """Return ids, positions and live inputs of the sampled entities."""
    evidence, items = candidate.evidence, candidate.items
    spec = TowerSpec.from_json(candidate.manifest.models[str(table.producer.model)].spec)
    if table.entity == "item":
        features = evidence.item_features(spec)
        usable = features.of(evidence.item_rows)[1]
        positions = select_spread_rows(evidence.item_rows[usable], SKEW_SAMPLE)
        columns, _ = features.of(positions)
        sources = [
            LiveInput(
                item=row,
                features={
                    str(feature.column): _to_python_value(columns[feature.name][index])
                    for feature in spec.features
                }
                or None,
            )
            for index, row in enumerate(positions.tolist())
        ]
        raws = [items.raw_id(row) for row in positions.tolist()]
    else:
        users = evidence.users.users
        rows = usable_inputs(items, users, {table.name: spec})[0]
        if table.producer.model == evidence.bundle.user_tower.name:
            # Whoever brought a vector along was not answered by the tower.
            rows = rows[~users.has_vector[rows]]
        rows = select_spread_rows(rows, SKEW_SAMPLE)
        positions, raws = evidence.users.positions[rows], to_raw_ids(users.ids.take(rows))
        sources = [
            LiveInput(
                history=tuple(
                    items.raw_id(ordinal)
                    for ordinal in users.ordinals[
                        users.indptr[row] : users.indptr[row + 1]
                    ].tolist()
                ),
                features={
                    str(feature.column): _feature_as_sent(users, str(feature.column), row)
                    for feature in spec.features
                }
                or None,
            )
            for row in rows.tolist()
        ]
    return raws, positions, [predictor.prepare(table.name, live_input) for live_input in sources]


def _feature_as_sent(users: ShardInput, column: str, row: int) -> FeatureValue:
    """Return a user's feature as a caller would send it."""
    return _to_python_value(users.features[column][row].as_py())


def _to_python_value(value: Any) -> FeatureValue:
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    feature_value: FeatureValue = tuple(value) if isinstance(value, list) else value
    return feature_value


def _overlap(table: Table, pairs: Pairs) -> float:
    overlaps = []
    for stored_record, live in pairs:
        stored_items, theirs = (
            decode_record(table.layout, record).items for record in (stored_record, live)
        )
        if stored_items is None or theirs is None:
            return float("nan")
        # Of a user for whom nothing is left, both have nothing.
        top = min(SKEW_DEPTH, max(len(stored_items), len(theirs)))
        overlaps.append(overlap(stored_items[:top], theirs[:top], top))
    return float(np.mean(overlaps))


def _cosine(table: Table, pairs: Pairs) -> float:
    stored_numbers, theirs = (
        np.array([decode_record(table.layout, pair[side]).numbers for pair in pairs])
        for side in (0, 1)
    )
    return float(row_cosines(stored_numbers, theirs).mean())


def _read(candidate: Candidate, table: Table, positions: NDArray[np.int64]) -> list[bytes]:
    directory, size = candidate.evidence.directories[table.entity], table.layout.size_bytes
    pipeline = candidate.control.client.pipeline(transaction=False)
    for position in positions.tolist():
        page, offset = table.locate(*directory.locate(position))
        name = candidate.control.keys.page(candidate.manifest.generation, table.name, page)
        pipeline.getrange(name, offset, offset + size - 1)
    return list(pipeline.execute())
