"""Gates: what a generation must prove before it may be published. A gate that cannot answer says no."""

import math
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.directory import Directory
from cache.errors import LarderError
from cache.items import ItemTable
from cache.keys import FeatureValue, fingerprint
from cache.manifest import EntitySet, Manifest, Table
from cache.predictor import LiveInput, Predictor
from cache.records import decode
from cache.tower import TowerSpec
from precompute.config import GateThresholds
from precompute.control import Control
from precompute.load import BadPage, parts_of, verify_part
from precompute.partition import ShardInput, read_shard

SKEW_SAMPLE = 200
SKEW_SHARDS = 4
SKEW_TOP = 20
READ_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one gate found; `threshold` is what `value` was held against."""

    rule: str
    passed: bool
    value: float | str | None
    threshold: float | str | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "rule": self.rule,
            "passed": self.passed,
            "value": self.value,
            "threshold": self.threshold,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A loaded generation with what its gates may look at; `live` is None for the first one ever."""

    manifest: Manifest
    root: Path
    items: ItemTable
    control: Control
    live: Manifest | None
    thresholds: GateThresholds
    history_limit: int


Gate = Callable[[Candidate], Verdict]


def at_least(rule: str, value: float, threshold: float, note: str = "") -> Verdict:
    """A verdict on a floor; NaN fails."""
    return Verdict(rule, value >= threshold, round(value, 6), threshold, note)


def at_most(rule: str, value: float, threshold: float, note: str = "") -> Verdict:
    """A verdict on a ceiling; NaN fails."""
    return Verdict(rule, value <= threshold, round(value, 6), threshold, note)


def maxmemory_policy(candidate: Candidate) -> Verdict:
    """Redis may evict overlays only."""
    return Verdict(
        "maxmemory_policy", True, candidate.control.check_policy(), "volatile-* or noeviction"
    )


def pages_in_redis(candidate: Candidate) -> Verdict:
    """Every page, read back from Redis, has its checksum."""
    client, keys, manifest = candidate.control.client, candidate.control.keys, candidate.manifest
    pages, bad = 0, []
    for part in parts_of(manifest):
        # Every part is read, also after a bad one: one more `load` must repair them all.
        try:
            pages += verify_part(
                client, keys, manifest, candidate.root, part, chunk_bytes=READ_CHUNK_BYTES
            )
        except BadPage as error:
            bad.append(error.message)
    return Verdict(
        "pages_in_redis",
        not bad,
        pages,
        manifest_pages(manifest),
        bad[0] if bad else "pages whose checksum matched",
    )


def manifest_pages(manifest: Manifest) -> int:
    """Pages of all tables."""
    return sum(table.pages for table in manifest.tables.values())


def coverage_of_source(candidate: Candidate) -> Verdict:
    """Entities scored, of all that the sources name."""
    facts = candidate.manifest.facts
    share = facts["users_scored"] / max(1, facts["users_in_source"])
    return at_least("coverage_of_source", share, candidate.thresholds.coverage_of_source)


def coverage_of_live(candidate: Candidate) -> Verdict:
    """Entities of this generation against the live one's."""
    return _against_live(
        "coverage_of_live", candidate, "user", candidate.thresholds.coverage_of_live
    )


def items_of_live(candidate: Candidate) -> Verdict:
    """Items of this generation against the live one's."""
    return _against_live("items_of_live", candidate, "item", candidate.thresholds.items_of_live)


def _against_live(rule: str, candidate: Candidate, entity: str, threshold: float) -> Verdict:
    if candidate.live is None:
        return Verdict(
            rule, True, None, threshold, "the first generation has nothing to be compared with"
        )
    before = candidate.live.entity_sets[entity].count
    return at_least(rule, candidate.manifest.entity_sets[entity].count / max(1, before), threshold)


def directories_sorted(candidate: Candidate) -> Verdict:
    """Hashes strictly ascending within their shard's range: no entity twice, none in a wrong place."""
    for entities in candidate.manifest.entity_sets.values():
        directory = Directory.open(candidate.root, entities)
        hashes = directory.hashes()
        if len(hashes) != entities.count:
            return Verdict(
                "directories_sorted", False, len(hashes), entities.count, f"{entities.name}: count"
            )
        ascending = bool((hashes[1:] > hashes[:-1]).all())
        starts_well = all(
            not len(part) or part[0] >= np.uint64(entry.first_hash)
            for part, entry in zip(directory.parts, entities.parts, strict=True)
        )
        if not (ascending and starts_well):
            return Verdict(
                "directories_sorted", False, "out of order", "strictly ascending", entities.name
            )
    return Verdict("directories_sorted", True, "strictly ascending", "strictly ascending")


def short_lists(candidate: Candidate) -> Verdict:
    """Share of users with fewer than K items although the catalogue, less their history, has enough."""
    facts = candidate.manifest.facts
    share = facts["short_lists"] / max(1, facts["users_scored"])
    return at_most("short_lists", share, candidate.thresholds.short_lists)


def index_recall(candidate: Candidate) -> Verdict:
    """The worst recall of the FAISS indexes against the exact pass."""
    recalls = [index.recall for index in candidate.manifest.indexes.values()]
    if not recalls:
        return Verdict(
            "index_recall", True, None, candidate.thresholds.index_recall, "no table uses an index"
        )
    worst = _worst(float("nan") if recall is None else recall for recall in recalls)
    return at_least("index_recall", worst, candidate.thresholds.index_recall)


def _worst(values: Iterable[float]) -> float:
    """The smallest, or NaN if there is one (`min` would depend on the order)."""
    return min(values, key=lambda value: -math.inf if math.isnan(value) else value)


def int8_agreement(candidate: Candidate) -> Verdict:
    """The worst overlap of a quantized model's answers with the full-precision ones.

    Of the user tower's top 20; of the best label of every model that a value table shows.
    """
    manifest, threshold = candidate.manifest, candidate.thresholds.int8_overlap
    figures = {"user_tower": "overlap_at_20"} | {
        str(table.producer.model): "overlap_at_1"
        for table in manifest.tables.values()
        if table.producer.kind == "value"
    }
    overlaps = {
        name: float(manifest.models[name].agreement.get(figure, float("nan")))
        for name, figure in figures.items()
        if manifest.models[name].agreement.get("precision") != "fp32"
    }
    if not overlaps:
        why = manifest.models["user_tower"].agreement.get("why", "")
        return Verdict("int8_agreement", True, None, threshold, f"no model is quantized: {why}")
    worst = _worst(overlaps.values())
    named = next(name for name, value in overlaps.items() if value is worst)
    note = f"{figures[named]} of {named} with fp32, the worst of {', '.join(overlaps)}"
    return at_least("int8_agreement", worst, threshold, note)


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
    worst = _worst(compared.values())
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


GATES: tuple[Gate, ...] = (
    maxmemory_policy,
    directories_sorted,
    coverage_of_source,
    coverage_of_live,
    items_of_live,
    short_lists,
    index_recall,
    int8_agreement,
    pages_in_redis,
    skew,
)


def run_gates(candidate: Candidate, gates: Sequence[Gate] = GATES) -> list[Verdict]:
    """Every gate's verdict; one that raises or outlasts `timeout_s` has failed."""
    return [_run(gate, candidate) for gate in gates]


def _run(gate: Gate, candidate: Candidate) -> Verdict:
    answered: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    # A daemon, not a pool: the program's exit would wait for a pool's thread, and so for a gate that hangs.
    thread = threading.Thread(
        target=lambda: answered.put(_judge(gate, candidate)),
        name=f"gate-{gate.__name__}",
        daemon=True,
    )
    thread.start()
    try:
        return answered.get(timeout=candidate.thresholds.timeout_s)
    except queue.Empty:
        return Verdict(gate.__name__, False, "timed out", candidate.thresholds.timeout_s)


def _judge(gate: Gate, candidate: Candidate) -> Verdict:
    name = gate.__name__
    try:
        return gate(candidate)
    except LarderError as error:
        return Verdict(name, False, error.code, None, error.message)
    except Exception as error:
        return Verdict(name, False, type(error).__name__, None, str(error))
