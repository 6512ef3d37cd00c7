"""Towers of a night: inputs bound by name, models run on the processor, or on a GPU and compared with ONNX."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cache.errors import BundleError, ConfigError, LarderError, ModelFailed, SourceError
from cache.format.item_table import ItemTable, Ordinals
from cache.format.manifest import FEATURE_ONLY_USERS_FACT
from cache.model.runtime import Accelerator
from cache.model.tower import AnyTower, Histories, Inputs, Tile, Tower, repeat_values, row_count_of, select_input_rows
from cache.model.tower_spec import TowerSpec
from cache.process.host import usable_cores
from precompute.builds.build import Build, fetch_model, open_bundle
from precompute.builds.reports import BEGIN_REPORT
from precompute.bundles.bundle import Bundle, BundleModel, demand_sha256
from precompute.config.devices import AUTO, limit_gpu_memory
from precompute.config.settings import NightConfig
from precompute.partitions.shard_input import ShardInput
from precompute.sources.features import demand_column_type, read_feature_values
from precompute.sources.files import feature_file
from precompute.sources.readers import feature_schema
from precompute.sources.unusable import format_case_value

_log = logging.getLogger(__name__)

FeaturesByModel = dict[str, dict[str, NDArray[Any]]]
"""Features by model and input name: two models may use one input name for different columns."""

DEVICE_AGREEMENT = 1e-4
"""Largest deviation of a tower on a device from its ONNX file on the processor, relative to the largest number of the
row: the tolerance of the gates `exact_numbers` and `item_vectors`."""

DEVICE_LENGTH_AGREEMENT = 8e-6
"""Length of the deviation of a user's vector, relative to the vector's length. Two scores of a list then differ by at
most twice this, which together with the rounding of their sums is the tolerance of the gate `exact_lists`."""

DEVICE_TILE = Tile(1 << 14, 1 << 27)
"""Tile of a GPU: a whole chunk of users with short histories, or 512 MiB of gathered float32."""

_VECTOR_TOWER = "user_tower"
_COMPARED_ROWS = 64


def bind_inputs(
    spec: TowerSpec,
    *,
    histories: Histories | None = None,
    features: Mapping[str, NDArray[Any]] | None = None,
    item_indices: NDArray[np.int64] | None = None,
) -> Inputs:
    """Return a tower's inputs by name; `features` are keyed by input name."""
    inputs_by_name: dict[str, Histories | NDArray[Any]] = {}
    for input_spec in spec.inputs:
        if input_spec.bind == "history":
            if histories is None:
                raise ConfigError(f"input {input_spec.name!r} takes a history, but this entity has none")
            inputs_by_name[input_spec.name] = histories
        elif input_spec.bind == "item_index":
            if item_indices is None:
                raise ConfigError(f"input {input_spec.name!r} takes an item index, but this entity has none")
            inputs_by_name[input_spec.name] = item_indices
        else:
            inputs_by_name[input_spec.name] = (features or {})[input_spec.name]
    return inputs_by_name


def prepare_inputs(
    items: ItemTable, entities: ShardInput, specs: Mapping[str, TowerSpec]
) -> tuple[dict[str, NDArray[np.bool_]], Histories, FeaturesByModel]:
    """Return (mask by model of rows with every input, histories in model indices, features by model).

    Feature values of unusable rows are undefined.
    """
    model_indices = items.model_indices_of(Ordinals(entities.history_ordinals))
    is_usable_item = (model_indices >= 0) & _is_recent(entities)
    running_counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_usable_item)])
    histories = Histories(running_counts[entities.history_indptr], model_indices[is_usable_item])
    is_usable_by_model: dict[str, NDArray[np.bool_]] = {}
    features: FeaturesByModel = {model_name: {} for model_name in specs}
    for model, spec in specs.items():
        is_usable_by_model[model] = np.ones(len(entities.entity_ids), np.bool_)
        if spec.history is not None and not (entities.answers_without_history and spec.features):
            is_usable_by_model[model] &= np.diff(histories.indptr) > 0
        for feature in spec.features:
            values = read_feature_values(entities.features[str(feature.column)], feature)
            is_usable_by_model[model] &= values.usable_mask
            features[model][feature.name] = values.input_numbers
    return is_usable_by_model, histories, features


def select_usable_inputs(
    items: ItemTable, entities: ShardInput, specs: Mapping[str, TowerSpec]
) -> tuple[NDArray[np.int64], Histories, FeaturesByModel]:
    """Return (rows with every input of all these models, histories and features as in `prepare_inputs`)."""
    is_usable_by_model, histories, features = prepare_inputs(items, entities, specs)
    is_usable = np.logical_and.reduce([np.ones(len(entities.entity_ids), np.bool_), *is_usable_by_model.values()])
    return np.flatnonzero(is_usable), histories, features


def _is_recent(entities: ShardInput) -> NDArray[np.bool_]:
    """Mask of the history items within the newest `history_limit` of their entity, bool [len(ordinals)]."""
    history_lengths = np.diff(entities.history_indptr)
    places_from_end = repeat_values(entities.history_indptr[1:], history_lengths) - np.arange(
        len(entities.history_ordinals)
    )
    return np.asarray(places_from_end <= entities.history_limit, np.bool_)


def computes_feature_only_users(build: Build) -> bool:
    """True if the night computes users whom only the feature table names, as `begin` decided."""
    return bool(build.need_report(BEGIN_REPORT).get(FEATURE_ONLY_USERS_FACT, False))


def demand_feature_types(config: NightConfig, bundle: Bundle) -> None:
    """Raise SourceError for the first feature column that is missing, or whose type does not fit its input."""
    for model in bundle.models:
        for feature in model.spec.features:
            path = feature_file(config, model.entity, str(feature.column))
            column = str(feature.column)
            column_type = feature_schema(path, (column,), bundle.columns_of_lists).field(column).type
            demand_column_type(column_type, feature, f"{path}, for {model.name}")


def open_tower(build: Build, model: BundleModel, device: str | None) -> AnyTower:
    """Open a model of the build on the named torch device, or (None) on the processor.

    On a device the bundle's exported program runs; without a program, ONNX Runtime's CUDA provider; without that, the
    processor.
    """
    path, threads = fetch_model(build, model), build.config.threads or usable_cores()
    tower = Tower.open(path, model.spec, threads=threads)
    if device is None:
        return tower
    device_model = _open_on_device(build, model, device)
    if isinstance(device_model, str):
        _log.info("%s stays on the processor: %s", model.name, device_model)
        return tower
    may_fall_back = build.config.device == AUTO and model.program_path is None
    return DeviceTower(model.name, tower, device_model, may_fall_back=may_fall_back)


def run_named(tower: AnyTower, inputs: Inputs, row_in_words: Callable[[int], str]) -> NDArray[np.float32]:
    """Return outputs float32 [n, output_dims]; raise SourceError naming the first row on which the model fails.

    `row_in_words` names a row, as in "user 'ann'".
    """
    try:
        return tower.run(inputs)
    except Exception as error:
        if isinstance(error, LarderError) and not isinstance(error, ModelFailed):
            raise
        rows = np.arange(row_count_of(inputs))
        while len(rows) > 1:
            first_half = rows[: len(rows) // 2]
            rows = first_half if _does_raise(tower, inputs, first_half) else rows[len(rows) // 2 :]
        if not _does_raise(tower, inputs, rows):
            raise  # not due to a single row: out of memory, for example
        row = int(rows[0])
        value_by_column = {
            str(feature.column): np.asarray(inputs[feature.name])[row] for feature in tower.spec.features
        }
        inputs_text = ", ".join(f"{column} {format_case_value(value)}" for column, value in value_by_column.items())
        cause = error.__cause__ or error
        error_lines = str(cause).strip().splitlines()[-1:] or [type(cause).__name__]
        model = f"the model {error.details['model']}" if isinstance(error, ModelFailed) else "the model"
        raise SourceError(
            f"{row_in_words(row)}: {model} cannot be run on {inputs_text or 'its input'} "
            f"({format_case_value(error_lines[0])}); correct the value in the table, or remove it",
            columns=sorted(value_by_column),
        ) from error


def _does_raise(tower: AnyTower, inputs: Inputs, row_indexes: NDArray[np.int64]) -> bool:
    try:
        tower.run(select_input_rows(inputs, row_indexes))
    except Exception:
        return True
    return False


class DeviceModel(Protocol):
    """Form of a model that runs on a device."""

    def outputs(self, inputs_of_batches: Iterable[Sequence[NDArray[Any]]]) -> Iterator[NDArray[np.float32]]:
        """Yield the outputs of each batch of inputs; raise MemoryError if the device's memory is too small."""


class DeviceTower:
    """Model on a device, fed like its ONNX file; its first rows are compared with that file on the processor.

    If the two disagree, it continues on the processor if it `may_fall_back` (no setting asks for the device), else it
    raises. If the device fails, it always continues on the processor.
    """

    def __init__(
        self, model_name: str, tower: Tower, device_model: DeviceModel, *, may_fall_back: bool = False
    ) -> None:
        self.spec = tower.spec
        self._name = model_name
        self._tower = tower
        self._device_model = device_model
        self._input_names = [input_spec.name for input_spec in tower.spec.inputs]
        self._tile = DEVICE_TILE
        self._is_compared = False
        self._may_fall_back = may_fall_back
        self._is_on_processor = False

    def run(self, inputs: Inputs) -> NDArray[np.float32]:
        """Return outputs float32 [n, output_dims]; raise BundleError on a disagreement without a fallback."""
        outputs = None
        try:
            if not (self._is_compared or self._is_on_processor):
                self._compare_with_processor(inputs)
            if not self._is_on_processor:
                outputs = self._run_on_device(inputs)
        except BundleError as error:
            if not self._may_fall_back or isinstance(error, ModelFailed):
                raise
            self._fall_back(error.message)
        except RuntimeError as error:
            from precompute.device.failures import is_of_device  # torch is already loaded

            if not is_of_device(error):
                raise
            self._fall_back(str(error))
        return self._tower.run(inputs) if outputs is None else outputs

    def _fall_back(self, reason: str) -> None:
        self._is_on_processor = True
        _log.warning("%s stays on the processor: %s", self._name, reason)

    def _run_on_device(self, inputs: Inputs) -> NDArray[np.float32] | None:
        """Return the device's outputs; None if its memory is too small for one row."""
        outputs = np.empty((row_count_of(inputs), self.spec.output_dims), np.float32)
        while True:
            tile = self._tile
            try:
                self._fill_outputs(outputs, inputs, tile)
            except MemoryError as error:
                if tile.rows_max == 1:
                    _log.warning("%s: %s; using ONNX Runtime instead", self._name, error)
                    return None
                self._tile = tile.halved()  # concurrent callers each halve the tile that they tried
                _log.info("%s: out of memory with %s; retrying with half of it", self._name, tile)
            else:
                return outputs

    def _fill_outputs(self, model_outputs: NDArray[np.float32], inputs: Inputs, tile: Tile) -> None:
        rows_of_batches: list[NDArray[np.int64]] = []

        def inputs_of_batches() -> Iterator[Sequence[NDArray[Any]]]:
            for rows, feed in self._tower.batches(inputs, tile=tile):
                rows_of_batches.append(rows)
                yield [feed[name] for name in self._input_names]

        for batch_index, batch_outputs in enumerate(self._device_model.outputs(inputs_of_batches())):
            model_outputs[rows_of_batches[batch_index]] = batch_outputs[: len(rows_of_batches[batch_index])]

    def _compare_with_processor(self, inputs: Inputs) -> None:
        """Compare a few rows, except those that are finite on neither side, which get no answer anyway."""
        rows = np.arange(min(_COMPARED_ROWS, row_count_of(inputs)))
        probe_inputs = select_input_rows(inputs, rows)
        expected_outputs, device_outputs = (self._tower.run(probe_inputs), self._run_on_device(probe_inputs))
        if device_outputs is None:
            return
        is_finite = np.isfinite(expected_outputs).all(axis=1)
        has_same_finite_rows = np.array_equal(is_finite, np.isfinite(device_outputs).all(axis=1))
        expected_outputs, deviations = (
            expected_outputs[is_finite],
            device_outputs[is_finite] - expected_outputs[is_finite],
        )
        largest_deviation = _worst_deviation(np.abs(deviations).max(axis=1), np.abs(expected_outputs).max(axis=1))
        self._demand_agreement(
            largest_deviation if has_same_finite_rows else float("nan"), DEVICE_AGREEMENT, "a row's largest number"
        )
        if self._name == _VECTOR_TOWER:
            length_deviation = _worst_deviation(
                np.linalg.norm(deviations, axis=1), np.linalg.norm(expected_outputs, axis=1)
            )
            self._demand_agreement(length_deviation, DEVICE_LENGTH_AGREEMENT, "a vector's length")
        self._is_compared = len(expected_outputs) > 0

    def _demand_agreement(self, relative_error: float, threshold: float, scale_text: str) -> None:
        if relative_error <= threshold:
            return
        raise BundleError(
            f"{self._name} on the device differs from its ONNX file on the processor by {relative_error:.2g} "
            f"of {scale_text}, "
            f"more than {threshold:g}: export both from the same weights in float32, or set device to `off`",
            model=self._name,
            value=relative_error,
            threshold=threshold,
        )


class OnnxOnGpu:
    """The ONNX file itself, run by ONNX Runtime's GPU provider."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self._input_names = [input_spec.name for input_spec in tower.spec.inputs]

    def outputs(self, inputs_of_batches: Iterable[Sequence[NDArray[Any]]]) -> Iterator[NDArray[np.float32]]:
        """Yield the outputs of each batch; raise MemoryError if the provider's memory arena is full."""
        for feed in inputs_of_batches:
            yield self._tower.run_batch(dict(zip(self._input_names, feed, strict=True)))


def _open_on_device(build: Build, model: BundleModel, device: str) -> DeviceModel | str:
    """Return the form of a model that runs on a device, or the reason why there is none."""
    if model.program_path is not None:
        demand_sha256(model.program_path, model.program_sha256)
        from precompute.device.program import Program

        return Program.open(model.program_path, [input_spec.name for input_spec in model.spec.inputs], device)
    device_kind, _, device_ordinal = device.partition(":")
    if device_kind != "cuda":
        return f"its bundle has no program, and {device} is not a GPU"
    accelerator = Accelerator("cuda", int(device_ordinal))
    if (reason := accelerator.missing_reason()) is not None:
        return f"its bundle has no program, and {reason}"
    # Each such model has its own memory arena; torch has one more.
    arena_count = 1 + sum(bundle_model.program_path is None for bundle_model in open_bundle(build).models)
    limit_bytes = limit_gpu_memory(device, build.config.device_tasks * arena_count)
    accelerator = replace(accelerator, memory_max_bytes=limit_bytes)
    gpu_tower = Tower.open(fetch_model(build, model), model.spec, accelerator=accelerator)
    if gpu_tower.provider != accelerator.provider:
        return f"its bundle has no program, and ONNX Runtime could not load its provider for {device}"
    return OnnxOnGpu(gpu_tower)


def _worst_deviation(output_errors: NDArray[np.float32], output_magnitudes: NDArray[np.float32]) -> float:
    return float((output_errors / np.maximum(output_magnitudes, np.float32(1e-30))).max(initial=0))
