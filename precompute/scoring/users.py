"""Scoring the users of one shard: reading, encoding, scoring and writing overlap, a chunk of users at a time."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.format.ids import fingerprints
from cache.format.item_table import ItemTable
from cache.format.records.layout import NO_ITEM, Layout
from cache.model.tower import Histories
from cache.model.tower_spec import TowerSpec
from precompute.builds.build import Build, cut_of, fetch_partition
from precompute.builds.filtered_items import allowed_items
from precompute.builds.tables import layout_of, metric_of, scored_tables
from precompute.bulk.headroom import demand_disk
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.progress import Progress
from precompute.config.settings import TableConfig
from precompute.partitions.catalogue import VECTORS, directory_file, open_items
from precompute.partitions.shard_input import ShardInput, read_shard, scratch_folder, slice_shard
from precompute.partitions.stages import Stages
from precompute.scoring.chunk import Chunk
from precompute.scoring.encoding import Answers, encode, finite_rows
from precompute.scoring.inputs import bind, inputs_of
from precompute.scoring.shard import Place, Scorers, described
from precompute.scoring.tables import GrowingFile, PageFile
from precompute.scoring.towers import AnyTower
from precompute.sources.unusable import NOT_FINITE, UNFIT, Unusable
from precompute.topk.topk import AnyScorer

CHUNK_USERS = 16_384
"""Users scored at once: enough for the matrix product."""
CHUNK_BYTES = 32 << 20
"""Bytes that the results of a chunk may take; seven chunks are under way at most."""

PARTITION = "work/partition"


@dataclass(frozen=True, slots=True, eq=False)
class ShardWork:
    """State that all chunks of one shard share."""

    build: Build
    number: int
    items: ItemTable
    tables: Mapping[str, TableConfig]
    layouts: Mapping[str, Layout]
    models: Mapping[str, BundleModel]
    bundle: Bundle
    place: Place
    seconds: dict[str, float]
    counts: dict[str, int]
    unusable: Unusable
    allowed: Mapping[str, NDArray[np.bool_]]
    """Items that the lists of some tables are of, bool [items]; all of them where a table is not named."""

    @classmethod
    def of(cls, build: Build, bundle: Bundle, number: int, scorers: Scorers) -> "ShardWork":
        fetch_partition(build, number)
        build.fetch(VECTORS)
        begun, place = build.need("begin"), scorers.at(number)
        tables = scored_tables(build.config, bundle, "user")
        wanted = {str(each.value) for each in tables.values() if each.kind == "value"}
        models = {"user_tower": bundle.user_tower, **{each: bundle.values[each] for each in wanted}}
        return cls(
            build=build,
            number=number,
            items=open_items(build.root, begun, dims=bundle.dims),
            tables=tables,
            layouts={name: layout_of(bundle, table) for name, table in tables.items()},
            models=models,
            bundle=bundle,
            place=place,
            seconds=dict.fromkeys(("read", "tower", "topk", "write"), 0.0),
            counts=dict.fromkeys(("entities", "scored", "short", "seen"), 0),
            unusable=Unusable(),
            allowed=allowed_items(build),
        )

    @property
    def chunk_users(self) -> int:
        """Number of users in a chunk: at most CHUNK_USERS, fewer where their results would exceed CHUNK_BYTES."""
        width = 4 * self.bundle.dims + sum(each.size_bytes for each in self.layouts.values())
        return max(1, min(CHUNK_USERS, CHUNK_BYTES // width))

    def pages(self, table: str) -> str:
        return f"tables/{table}/{self.number:04d}.pages"

    @contextmanager
    def busy(self, stage: str) -> Iterator[None]:
        """Adds up the time that a stage takes; each runs in one thread."""
        started = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - started

    def inputs(self, scratch: Path) -> Iterator[tuple[ShardInput, int]]:
        """Each slice of the shard, with how many of all slices come after it."""
        config, folder = self.build.config, self.build.root / PARTITION
        with self.busy("read"):
            slices = slice_shard(folder, self.number, config.shards, scratch)
        for number in slices.numbers:
            with self.busy("read"):
                found = read_shard(slices.folder, number, history_limit=config.history_limit)
            yield found, slices.numbers.stop - number - 1

    def read(self, scratch: Path) -> Iterator[Chunk]:
        """The shard's users for whom a model has its input; raises Refused where the disk has no room for them.

        Whoever lacks the history that a model wants is left out whole; an unusable feature costs the tables of the
        models that want it.
        """
        specs = {name: model.spec for name, model in self.models.items()}
        record_bytes = sum(each.size_bytes for each in self.layouts.values())
        before = 0
        for done, (entities, left) in enumerate(self.inputs(scratch), 1):
            count = len(entities.ids)
            usable, histories, features = inputs_of(self.items, entities, specs)
            # Whoever brings a vector along needs no tower for it.
            usable["user_tower"] &= ~entities.has_vector
            rows_of_any = np.flatnonzero(_of_any(usable, histories, specs) | entities.has_vector)
            demand_disk(self.build.root, len(rows_of_any) * record_bytes * (left + 1))
            seen = Histories(entities.indptr, entities.ordinals)
            self.counts["entities"] = before + count
            for start in range(0, len(rows_of_any), self.chunk_users):
                rows = rows_of_any[start : start + self.chunk_users]
                yield Chunk(
                    ids=[entities.ids[row] for row in rows.tolist()],
                    hashes=entities.hashes[rows],
                    histories=histories.take(rows),
                    features={
                        model: {name: column[rows] for name, column in columns.items()}
                        for model, columns in features.items()
                    },
                    usable={model: which[rows] for model, which in usable.items()},
                    seen=seen.take(rows),
                    entities=before + int(rows[-1]) + 1,
                    total=(before + count) * (done + left) // done,
                    vectors=None if entities.vectors is None else entities.vectors[rows],
                )
            before += count

    def encoded(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Chunks with the outputs of the towers, which are opened while the first chunk is read."""
        self._towers()
        yield from map(self.encode, chunks)

    def encode(self, chunk: Chunk) -> Chunk:
        """Adds the outputs of the towers to a chunk; its features are dropped, nothing needs them after."""
        chunk.marks = fingerprints(chunk.ids)
        with self.busy("tower"):
            for name, tower in self._towers().items():
                chunk.outputs[name] = self._outputs(chunk, name, tower)
            chunk.use_vectors()
        chunk.features = {}
        return chunk

    def _outputs(self, chunk: Chunk, name: str, tower: AnyTower) -> NDArray[np.float32]:
        """float32 [users, dims], NaN for who lacks an input; what else is not finite is noted."""
        usable, features = chunk.usable[name], chunk.features.get(name, {})
        if usable.all():
            found = tower.run(bind(tower.spec, histories=chunk.histories, features=features))
        else:
            rows = np.flatnonzero(usable)
            some = {key: values[rows] for key, values in features.items()}
            found = np.full((len(usable), tower.spec.output_dims), np.nan, np.float32)
            if len(rows):
                taken = chunk.histories.take(rows)
                found[rows] = tower.run(bind(tower.spec, histories=taken, features=some))
        self.unusable.looked_at(f"outputs of {name}", int(usable.sum()))
        chunk.answered[name] = finite_rows(found)
        if (bad := ~chunk.answered[name] & usable).any():
            self.unusable.note_rows(f"outputs of {name}", {NOT_FINITE: bad}, chunk.case)
        return found

    def _towers(self) -> dict[str, AnyTower]:
        return {name: self.place.tower(self.build, model) for name, model in self.models.items()}

    def scored(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Chunks with the lists of each table of lists; the items are made ready while the first chunk is read."""
        with self.place.turn:
            self._scorers()
        yield from map(self.score, chunks)

    def score(self, chunk: Chunk) -> Chunk:
        """Adds the lists of each table of lists to a chunk."""
        threads = self.build.config.threads or None
        with self.place.turn, self.busy("topk"):
            for name, scorer in self._scorers().items():
                users, k = chunk.outputs["user_tower"], self.tables[name].k
                if not (answered := chunk.answered["user_tower"]).all():  # theirs is left out
                    users = np.where(answered[:, None], users, np.float32(0))
                chunk.lists[name] = scorer.top(
                    users, k, chunk.seen, allowed=self.allowed.get(name), threads=threads
                )
        return chunk

    def _scorers(self) -> dict[str, AnyScorer]:
        return {
            name: self.place.of(self.items, metric_of(self.bundle, table))
            for name, table in self.tables.items()
            if table.kind == "user_topk"
        }

    @property
    def seen_files(self) -> tuple[str, ...]:
        """Files of what users had, which filters leave out: where each one's items end, and the items; none without."""
        if not self.build.config.sources.item_attributes:
            return ()
        return tuple(f"seen/{self.number:04d}.{part}" for part in ("ends", "items"))

    def write_seen(self, chunk: Chunk, files: Sequence[GrowingFile]) -> None:
        """Writes what the users of a chunk had, in hash order."""
        ends, items = files
        ends.write((self.counts["seen"] + chunk.seen.indptr[1:]).astype("<u8").tobytes())
        items.write(chunk.seen.indices.astype("<u4").tobytes())
        self.counts["seen"] += int(chunk.seen.indptr[-1])

    def write(self, chunk: Chunk, files: Mapping[str, PageFile], directory: GrowingFile) -> None:
        """Writes a chunk as records, in hash order."""
        at = cut_of(self.build.generation)
        for name, table in self.tables.items():
            model = str(table.value) if table.kind == "value" else "user_tower"
            found: Answers = chunk.outputs[model]
            has_answer = chunk.answered[model]
            if table.kind == "user_topk":
                found = chunk.lists.pop(name)
                if (
                    name not in self.allowed
                ):  # under a filter lists are short, and a gate knows how short
                    possible = np.minimum(table.k, self.items.count - np.diff(chunk.seen.indptr))
                    is_short = (found[0] != NO_ITEM).sum(axis=1) < possible
                    self.counts["short"] += int((is_short & has_answer).sum())
            records, unfit = encode(self.layouts[name], chunk.marks, found, has_answer, at)
            self.unusable.looked_at(f"records of {name}", int(has_answer.sum()))
            if unfit.any():
                self.unusable.note_rows(f"records of {name}", {UNFIT: unfit}, chunk.case)
            files[name].append(records)
        directory.write(chunk.hashes.astype("<u8").tobytes())
        self.counts["scored"] += len(chunk.hashes)


def _of_any(
    usable: Mapping[str, NDArray[np.bool_]], histories: Histories, specs: Mapping[str, TowerSpec]
) -> NDArray[np.bool_]:
    """bool [users]: at least one model can answer for the user, who also has the history that any of them wants."""
    found: NDArray[np.bool_] = np.logical_or.reduce(list(usable.values()))
    if any(each.history is not None for each in specs.values()):
        found &= np.diff(histories.indptr) > 0
    return found


def score_users(
    build: Build, bundle: Bundle, shard: int, scorers: Scorers, progress: Progress
) -> dict[str, Any]:
    """All user tables of one shard; returns the shard's report. Memory does not depend on the number of users."""
    started = time.perf_counter()
    work = ShardWork.of(build, bundle, shard, scorers)
    place = directory_file("user", shard)
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(build.root / PARTITION))
        files = {
            name: stack.enter_context(
                PageFile(build.path(work.pages(name)), layout, build.config.page_bytes)
            )
            for name, layout in work.layouts.items()
        }
        directory = stack.enter_context(GrowingFile(build.path(place)))
        seen = [stack.enter_context(GrowingFile(build.path(each))) for each in work.seen_files]
        stages = stack.enter_context(Stages())  # last, so stopped before anything they use is gone
        encoded = stages.ahead(work.encoded(stages.ahead(work.read(scratch))))
        for chunk in stages.ahead(work.scored(encoded)):
            with work.busy("write"):
                work.write(chunk, files, directory)
                if seen:
                    work.write_seen(chunk, seen)
            progress(f"score shard {shard}", chunk.entities, chunk.total)
    count = work.counts["scored"]
    return {
        "entities": work.counts["entities"],
        "scored": count,
        "without_input": work.counts["entities"] - count,
        "short": work.counts["short"],
        "unusable": work.unusable.to_json(),
        "seconds": {**work.seconds, "all": time.perf_counter() - started},
        "directory": asdict(build.describe(place)),
        "seen": [asdict(build.describe(each)) for each in work.seen_files],
        "tables": {name: described(build, work.pages(name), count) for name in work.tables},
    }
