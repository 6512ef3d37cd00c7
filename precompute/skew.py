"""Skew: the night's records against what the live path answers for the same entities."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.directory import Directory
from cache.keys import FeatureValue, fingerprint
from cache.manifest import EntitySet, Table
from cache.predictor import LiveInput, Predictor
from cache.records import decode
from cache.tower import TowerSpec
from precompute.partition import ShardInput, read_shard
from precompute.verdict import Candidate, Verdict, at_least, worst_of

SKEW_SAMPLE = 200
SKEW_SHARDS = 4
SKEW_TOP = 20


def skew_shards(entities: EntitySet) -> list[int]:
    """The shards whose partition files the skew gate reads, spread over those with entities."""
    found = [number for number, part in enumerate(entities.parts) if part.count]
    return found[:: max(1, len(found) // SKEW_SHARDS)]


def skew(candidate: Candidate) -> Verdict:
    """A sample of entities answered by the live path agrees with their records as read from Redis.

    The worst of all top-K tables of users counts.
    """
    manifest, threshold = candidate.manifest, candidate.thresholds.skew_overlap
    tables = [
        each
        for each in manifest.tables.values()
        if each.producer.kind == "topk" and each.entity == "user"
    ]
    if not tables:
        return Verdict("skew", True, None, threshold, "no table to compare")
    entities = manifest.entity_sets["user"]
    directory = Directory.open(candidate.root, entities)
    predictor = Predictor.open(manifest, candidate.root, candidate.items)
    overlaps: dict[str, list[float]] = {table.name: [] for table in tables}
    for shard in skew_shards(entities):
        source = read_shard(
            candidate.root / "work/partition",
            shard,
            entities.seed,
            history_limit=candidate.history_limit,
        )
        # Of those with a record: an entity without input would only thin out the sample.
        positions = directory.find_many(source.hashes)
        scored = np.flatnonzero(positions >= 0)
        picked = np.linspace(0, len(scored) - 1, min(SKEW_SAMPLE // SKEW_SHARDS, len(scored)))
        for row in scored[np.unique(picked.astype(np.int64))].tolist():
            raw = source.ids[row]
            for table in tables:
                live = _answer(candidate, predictor, table, source, row)
                stored = decode(
                    table.layout, _read_record(candidate, table, directory, int(positions[row]))
                )
                if stored.fingerprint != fingerprint(raw):
                    return Verdict(
                        "skew",
                        False,
                        raw.decode(),
                        "its own record",
                        "a record belongs to another entity",
                    )
                answered = None if live is None else decode(table.layout, live).items
                overlaps[table.name].append(_overlap(stored.items, answered))
    compared = {name: float(np.mean(found)) for name, found in overlaps.items() if found}
    if len(compared) < len(tables):
        return Verdict("skew", False, None, threshold, "no entity could be compared")
    worst = worst_of(compared.values())
    named = next(name for name, value in compared.items() if value is worst)
    return at_least(
        "skew",
        worst,
        threshold,
        f"top-{SKEW_TOP} overlap of {len(overlaps[named])} entities in {named}",
    )


def _answer(
    candidate: Candidate, predictor: Predictor, table: Table, source: ShardInput, row: int
) -> bytes | None:
    """What the live path says about a row of the sources; None when it finds no usable input."""
    seen = source.ordinals[source.indptr[row] : source.indptr[row + 1]]
    spec = TowerSpec.from_json(candidate.manifest.models[str(table.producer.model)].spec)
    features = {str(each.column): _sent(source, str(each.column), row) for each in spec.features}
    prepared = predictor.prepare(
        table.name,
        LiveInput(
            history=tuple(candidate.items.raw_id(each) for each in seen.tolist()),
            features=features or None,
        ),
    )
    if prepared is None:
        return None
    mark = fingerprint(source.ids[row])
    return predictor.predict(table.name, [prepared], [mark], 0, blocked=np.empty(0, np.int64))[0]


def _sent(source: ShardInput, column: str, row: int) -> FeatureValue:
    """A feature as a caller would send it."""
    value: Any = source.features[column][row].as_py()
    return tuple(value) if isinstance(value, list) else value


def _overlap(stored: NDArray[np.uint32] | None, answered: NDArray[np.uint32] | None) -> float:
    if stored is None or answered is None:
        return float("nan")
    top = min(SKEW_TOP, len(stored))
    return len(np.intersect1d(stored[:top], answered[:top])) / max(1, top)


def _read_record(candidate: Candidate, table: Table, directory: Directory, position: int) -> bytes:
    page, offset = table.locate(*directory.place(position))
    name = candidate.control.keys.page(candidate.manifest.generation, table.name, page)
    raw: Any = candidate.control.client.getrange(name, offset, offset + table.layout.size_bytes - 1)
    return bytes(raw)
