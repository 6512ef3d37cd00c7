"""Gates: what a generation must prove before it may be published. A gate that cannot answer says no."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.directory import Directory
from cache.errors import LarderError
from cache.items import ItemTable
from cache.keys import fingerprint, hash_id
from cache.manifest import Manifest, Table
from cache.predictor import LiveInput, Predictor
from cache.records import decode
from precompute.config import GateThresholds
from precompute.control import Control
from precompute.load import parts_of, verify_part
from precompute.partition import read_shard

SKEW_SAMPLE = 200
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
    pages = sum(
        verify_part(client, keys, manifest, candidate.root, part, chunk_bytes=READ_CHUNK_BYTES)
        for part in parts_of(manifest)
    )
    return Verdict(
        "pages_in_redis", True, pages, manifest_pages(manifest), "pages whose checksum matched"
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
    worst = min(float("nan") if recall is None else recall for recall in recalls)
    return at_least("index_recall", worst, candidate.thresholds.index_recall)


def int8_agreement(candidate: Candidate) -> Verdict:
    """Overlap of the quantized user tower's lists with the full-precision ones."""
    agreement = candidate.manifest.models["user_tower"].agreement
    overlap = float(agreement.get("overlap_at_20", float("nan")))
    return at_least(
        "int8_agreement", overlap, candidate.thresholds.int8_overlap, "top-20 overlap with fp32"
    )


def skew(candidate: Candidate) -> Verdict:
    """A sample of entities answered by the live path agrees with their records as read from Redis."""
    manifest = candidate.manifest
    tables = [each for each in manifest.tables.values() if each.producer.kind == "topk"]
    if not tables:
        return Verdict("skew", True, None, candidate.thresholds.skew_overlap, "no table to compare")
    table, entities = tables[0], manifest.entity_sets["user"]
    directory = Directory.open(candidate.root, entities)
    predictor = Predictor.open(manifest, candidate.root, candidate.items)
    overlaps: list[float] = []
    shards = [number for number, part in enumerate(entities.parts) if part.count]
    for shard in shards[:: max(1, len(shards) // 4)]:
        source = read_shard(
            candidate.root / "work/partition",
            shard,
            entities.seed,
            history_limit=candidate.history_limit,
        )
        picked = np.linspace(0, len(source.ids) - 1, min(SKEW_SAMPLE // 4, len(source.ids))).astype(
            int
        )
        for row in np.unique(picked).tolist():
            raw = source.ids[row]
            position = directory.find(hash_id(raw, directory.seed))
            seen = source.ordinals[source.indptr[row] : source.indptr[row + 1]]
            history = tuple(candidate.items.raw_id(each) for each in seen.tolist())
            prepared = predictor.prepare(table.name, LiveInput(history=history))
            if position < 0 or prepared is None:
                continue
            live = predictor.predict(
                table.name, [prepared], [fingerprint(raw)], 0, blocked=np.empty(0, np.int64)
            )[0]
            stored = decode(table.layout, _read_record(candidate, table, directory, position))
            if stored.fingerprint != fingerprint(raw):
                return Verdict(
                    "skew",
                    False,
                    raw.decode(),
                    "its own record",
                    "a record belongs to another entity",
                )
            overlaps.append(_overlap(stored.items, decode(table.layout, live).items))
    if not overlaps:
        return Verdict(
            "skew", False, None, candidate.thresholds.skew_overlap, "no entity could be compared"
        )
    return at_least(
        "skew",
        float(np.mean(overlaps)),
        candidate.thresholds.skew_overlap,
        f"top-{SKEW_TOP} overlap of {len(overlaps)} entities",
    )


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
    verdicts = []
    # Not a context manager: leaving one would wait for the gate that hangs.
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gate")
    for gate in gates:
        name = gate.__name__
        future = pool.submit(gate, candidate)
        try:
            verdicts.append(future.result(timeout=candidate.thresholds.timeout_s))
        except FutureTimeout:
            verdicts.append(Verdict(name, False, "timed out", candidate.thresholds.timeout_s))
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gate")
        except LarderError as error:
            verdicts.append(Verdict(name, False, error.code, None, error.message))
        except Exception as error:
            verdicts.append(Verdict(name, False, type(error).__name__, None, str(error)))
    pool.shutdown(wait=False)
    return verdicts
