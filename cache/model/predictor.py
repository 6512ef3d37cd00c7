"""Live inference: opens and warms a generation's models, and computes records with them.

A record takes a tower, a candidate search and an exact re-score.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.errors import InvalidInput, LarderError, traceback_of
from cache.format.item_table import ItemTable
from cache.format.manifest import Artefact, Manifest, Model, Table
from cache.model.candidate_search import ListSearch, RankedLists, Searcher
from cache.model.input_preparation import HISTORY_LIMIT, LiveInput, PreparedInput, prepare_all, stack_features
from cache.model.ranking import Metric, score
from cache.model.runtime import Accelerator
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.records import FLAG_LIVE, Layout, encode_numbers, encode_topk
from cache.store.artefacts import ArtefactStore, fetch_checked, generation_path

ModelPrecision = Literal["int8", "fp32"]
EventModels = TypeVar("EventModels")
_NO_ORDINALS = np.empty(0, np.int64)
log = logging.getLogger(__name__)


class Predictor:
    """Towers and indexes of one generation; synchronous and thread-safe."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        items: ItemTable,
        towers: Mapping[str, Tower],
        searchers: Mapping[str, Searcher],
        precisions: Mapping[str, ModelPrecision],
        model_digest: str,
        fallback_reason: str | None = None,
        history_limit: int = sys.maxsize,
    ) -> None:
        self._history_limit = history_limit
        self.model_digest = model_digest
        self.fallback_reason = fallback_reason
        self.precisions = precisions
        self._tables = tables
        self._items = items
        self._towers = towers
        self._searchers = searchers

    @classmethod
    def open(
        cls,
        manifest: Manifest,
        generation_folder: Path,
        items: ItemTable,
        *,
        precision: ModelPrecision = "int8",
        threads: int = 1,
        cores: Sequence[int] = (),
        accelerator: Accelerator | None = None,
    ) -> Self:
        """Load the models and indexes of the tables' producers; `threads` per inference and search, towers on `cores`.

        A model that the night could not quantize runs in fp32; `precisions` shows this. If the `accelerator` cannot be
        used, or would leave most of an int8 model to the processor, the towers run on the processor, and
        `fallback_reason` says why.
        """
        model_names = {table.producer.model for table in manifest.tables.values()}
        models = {name: model for name, model in manifest.models.items() if name in model_names}
        file_by_model = {name: _model_file(model, precision) for name, model in models.items()}
        precisions = {name: model_precision for name, (model_precision, _) in file_by_model.items()}
        fallback_reason = None if accelerator is None else accelerator.missing_reason()
        if accelerator is not None and fallback_reason is None and "int8" in precisions.values():
            fallback_reason = (
                f"{accelerator.provider} supports few of the operators of int8 models: set precision to fp32"
            )
        if fallback_reason is not None:
            accelerator = None
        towers: dict[str, Tower] = {}
        for name, (_, file_path) in file_by_model.items():
            spec = TowerSpec.from_json(models[name].spec)
            towers[name] = Tower.open(
                generation_folder / file_path, spec, threads=threads, cores=cores, accelerator=accelerator
            )
        if accelerator is not None:
            fallback_reason = accelerator.fallback_reason(tower.provider for tower in towers.values())
        searchers = {
            name: Searcher.open(
                generation_folder / index.file.path, index.metric, expected_vector_count=items.count, threads=threads
            )
            for name, index in manifest.indexes.items()
        }
        hasher = hashlib.sha256()
        for name, model_precision in sorted(precisions.items()):
            hasher.update(f"{name}\0{model_precision}\0{manifest.models[name].digest}\0".encode())
        return cls(
            manifest.tables, items, towers, searchers, precisions, hasher.hexdigest(), fallback_reason,
            int(manifest.facts.get(HISTORY_LIMIT, sys.maxsize)),
        )  # fmt: skip

    def with_fp32_models(
        self, models: Mapping[str, Model], generation_folder: Path, *, threads: int = 1, cores: Sequence[int] = ()
    ) -> "Predictor":
        """Return a predictor of the same generation with only these models, in fp32.

        It shares this predictor's indexes.
        """
        towers = {}
        for name, model in models.items():
            if self.precisions.get(name) == "fp32":
                towers[name] = self._towers[name]
            else:
                spec = TowerSpec.from_json(model.spec)
                towers[name] = Tower.open(generation_folder / model.fp32.path, spec, threads=threads, cores=cores)
        precisions: dict[str, ModelPrecision] = dict.fromkeys(towers, "fp32")
        return Predictor(self._tables, self._items, towers, self._searchers, precisions, self.model_digest)

    @property
    def provider_by_model(self) -> dict[str, str]:
        """Name of ONNX Runtime's provider of each model: cpu, cuda or tensorrt."""
        return {name: tower.provider for name, tower in self._towers.items()}

    def supports(self, table: str) -> bool:
        """Return whether the table has a producer whose model and index are loaded."""
        manifest_table = self._tables.get(table)
        if manifest_table is None or manifest_table.producer.model not in self._towers:
            return False
        return manifest_table.kind != "topk" or manifest_table.producer.index in self._searchers

    def prepare(self, table: str, source: LiveInput) -> PreparedInput | None:
        """Convert a caller's input for the table's tower; None if nothing usable was sent (unknown items are dropped).

        Raises InvalidInput for features that the model does not take as sent.
        """
        (prepared,) = self.prepare_all(table, [source])
        if isinstance(prepared, InvalidInput):
            raise prepared
        return prepared

    def prepare_all(self, table: str, sources: Sequence[LiveInput]) -> list[PreparedInput | InvalidInput | None]:
        """Prepare many inputs at once.

        Returns, not raises, an InvalidInput for each input that the model does not accept.
        """
        return prepare_all(table, self._tower(table).spec, self._items, sources, self._history_limit)

    def predict(
        self,
        table: str,
        batch: Sequence[PreparedInput],
        fingerprints: Sequence[int],
        scored_at: int,
        *,
        blocked_ordinals: NDArray[np.int64] = _NO_ORDINALS,
    ) -> list[bytes]:
        """Compute one record per input, flagged live, in the table's layout; raise UnfitValue for unfit numbers."""
        outputs = self.vectors(batch)
        if self._tables[table].kind != "topk":
            return self.numbers(table, outputs, fingerprints, scored_at)
        ranked = self.search(table).lists(batch, outputs, blocked_ordinals)
        return self.lists(table, ranked, fingerprints, scored_at)

    def vectors(self, batch: Sequence[PreparedInput]) -> NDArray[np.float32]:
        """Run the tower; return float32 [n, dims] for inputs prepared for the same table."""
        tower = self._tower(batch[0].table)
        inputs = {input_spec.name: _tower_input(input_spec, batch) for input_spec in tower.spec.inputs}
        return tower.run(inputs)

    def search(self, table: str) -> ListSearch:
        """Return the search for the lists of a top-K table."""
        manifest_table, width = self._tables[table], self._tables[table].layout.width
        return ListSearch(self._searchers[str(manifest_table.producer.index)], self._items, width)

    def lists(
        self, table: str, ranked: RankedLists, fingerprints: Sequence[int], scored_at: int, *, record_flags: int = 0
    ) -> list[bytes]:
        """Encode each row of `ranked` as a record of a top-K table, flagged live and with `record_flags`."""
        layout, fingerprint_array = self._tables[table].layout, np.array(fingerprints, np.uint64)
        record_flags |= FLAG_LIVE
        return _split_records(layout, encode_topk(layout, fingerprint_array, *ranked, scored_at, flags=record_flags))

    def numbers(
        self, table: str, model_outputs: NDArray[np.float32], fingerprints: Sequence[int], scored_at: int
    ) -> list[bytes]:
        """Encode each row of outputs as a record of a vector or value table."""
        layout, fingerprint_array = self._tables[table].layout, np.array(fingerprints, np.uint64)
        return _split_records(
            layout, encode_numbers(layout, fingerprint_array, model_outputs, scored_at, flags=FLAG_LIVE)
        )

    def takes_floats_only(self, table: str) -> bool:
        """Return whether the table's model takes only float32 features."""
        inputs = self._tower(table).spec.inputs
        return all(input_spec.bind == "feature" and input_spec.dtype == "float32" for input_spec in inputs)

    def sent_vectors(self, table: str, batch: Sequence[PreparedInput]) -> NDArray[np.float32]:
        """Return the concatenated features, float32 [n, dims], for a model that takes only float32 features."""
        columns = [
            stack_features(input_spec, [prepared.features[input_spec.name] for prepared in batch])
            for input_spec in self._tower(table).spec.inputs
        ]
        return np.concatenate([column.reshape(len(batch), -1) for column in columns], axis=1)

    def sent_dims(self, table: str) -> int:
        """Width of the rows that `sent_vectors` returns."""
        return sum(input_spec.width or 1 for input_spec in self._tower(table).spec.inputs)

    def output_dims(self, table: str) -> int:
        """Width of the vectors that the table's model returns."""
        return self._tower(table).spec.output_dims

    def score_vector(
        self, table: str, user_vector: NDArray[np.float32], ordinals: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return float32 [n] scores of the given items for a vector, by the metric of a top-K table."""
        index = self._tables[table].producer.index
        searcher = self._searchers.get(str(index))
        metric: Metric = "inner_product" if searcher is None else searcher.metric
        scores: NDArray[np.float32] = score(user_vector[None], self._items.vectors, ordinals[None], metric)[0]
        return scores

    def warm(self) -> None:
        """Run every supported table once at each padded length, so that no request pays the cost of a first run."""
        for name, table in self._tables.items():
            if not self.supports(name) or not self._items.count:
                continue
            tower = self._tower(name)
            for length in tower.buckets or (1,):
                blank = tower.spec.blank_features()
                prepared = PreparedInput(name, np.zeros(length, np.int64), blank, 0, _NO_ORDINALS, 0)
                output = self.vectors([prepared])
                if table.kind == "topk":
                    self.search(name).lists([prepared], output, _NO_ORDINALS)

    def _tower(self, table: str) -> Tower:
        if not self.supports(table):
            raise InvalidInput(f"table {table!r} has no live producer", table=table)
        return self._towers[str(self._tables[table].producer.model)]


def live_files(manifest: Manifest, precision: ModelPrecision | None = None) -> Iterator[Artefact]:
    """Yield the files that only the live path reads: of all precisions, or of the given one."""
    for model in manifest.models.values():
        if precision != "int8" or model.int8 is None:
            yield from model.fp32_files
        if precision != "fp32" and model.int8 is not None:
            yield model.int8
    yield from (index.file for index in manifest.indexes.values())


def open_warmed(
    manifest: Manifest,
    generation_folder: Path,
    items: ItemTable,
    *,
    precision: ModelPrecision,
    threads: int = 1,
    cores: Sequence[int] = (),
    accelerator: Accelerator | None = None,
) -> Predictor:
    """Open the models in `generation_folder` and run each of them once; raise ONNX Runtime's errors.

    Used by replicas, and by the gate that checks a generation before it is published.
    """
    predictor = Predictor.open(
        manifest, generation_folder, items, precision=precision, threads=threads, cores=cores, accelerator=accelerator
    )
    predictor.warm()
    return predictor


def open_predictor(
    store: ArtefactStore,
    manifest: Manifest,
    items: ItemTable,
    precision: ModelPrecision,
    threads: int,
    cores: Sequence[int],
    accelerator: Accelerator | None,
) -> tuple[Predictor | None, str | None, str | None]:
    """Return (warmed predictor or None, error if there is none, reason why the processor replaces the accelerator)."""
    generation_folder = store.local(generation_path(manifest.generation))

    def open_on(device: Accelerator | None) -> Predictor:
        return open_warmed(
            manifest, generation_folder, items, precision=precision, threads=threads, cores=cores, accelerator=device
        )

    try:
        for artefact in live_files(manifest, precision):
            fetch_checked(store, manifest.generation, artefact)
        try:
            predictor = open_on(accelerator)
            fallback_reason = predictor.fallback_reason
        except Exception as error:  # a GPU may lack memory, an operator or a driver
            if accelerator is None:
                raise
            log.warning("generation %s: models failed on %s", manifest.generation, accelerator.provider, exc_info=error)
            predictor = open_on(None)
            fallback_reason = f"the models failed on {accelerator.provider} ({type(error).__name__}, see the log)"
    except Exception as error:  # stored answers must work without a model
        log.error("generation %s has no working model: %s", manifest.generation, error, exc_info=traceback_of(error))
        return None, _error_text(error), None
    if fallback_reason is not None:
        log.warning("generation %s: live models run on the processor: %s", manifest.generation, fallback_reason)
    return predictor, None, fallback_reason


def open_event_models(
    store: ArtefactStore, manifest: Manifest, open_models: Callable[[], EventModels], fallback_models: EventModels
) -> tuple[EventModels, str | None]:
    """Return (models for newer events, or `fallback_models` if they failed to open; the error or None)."""
    try:
        for artefact in [file for model in manifest.models.values() for file in model.fp32_files]:
            fetch_checked(store, manifest.generation, artefact)
        return open_models(), None
    except Exception as error:  # stored answers must work without a model
        log.error(
            "generation %s has no working model for newer events: %s",
            manifest.generation, error, exc_info=traceback_of(error),
        )  # fmt: skip
        return fallback_models, _error_text(error)


def _error_text(error: Exception) -> str:
    return error.message if isinstance(error, LarderError) else type(error).__name__


def _split_records(layout: Layout, records: NDArray[Any]) -> list[bytes]:
    records_bytes, record_bytes = records.tobytes(), layout.size_bytes
    return [records_bytes[start : start + record_bytes] for start in range(0, len(records_bytes), record_bytes)]


def _model_file(model: Model, precision: ModelPrecision) -> tuple[ModelPrecision, str]:
    if precision == "int8" and model.int8 is not None:
        return "int8", model.int8.path
    return "fp32", model.fp32.path


def _tower_input(input_spec: InputSpec, batch: Sequence[PreparedInput]) -> Histories | NDArray[Any]:
    match input_spec.bind:
        case "history":
            return Histories.of([prepared.history for prepared in batch])
        case "item_index":
            return np.array([prepared.item_index for prepared in batch], input_spec.dtype)
        case _:
            return stack_features(input_spec, [prepared.features[input_spec.name] for prepared in batch])
