"""ONNX model with inputs bound by name; a row's output does not depend on its batch."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import BundleError, ModelFailed
from cache.model.runtime import Accelerator, first_provider_of, ort
from cache.model.tower_spec import TowerSpec, check_padded_lengths


@dataclass(frozen=True, slots=True)
class Tile:
    """Largest size of one run: rows, and gathered numbers (rows x padded length x dims)."""

    rows_max: int
    numbers_max: int

    def halved(self) -> "Tile":
        """Return a tile with half the numbers and half the rows, at least one row."""
        return Tile(max(1, self.rows_max // 2), self.numbers_max // 2)


CPU_TILE = Tile(4096, 1 << 21)
"""Tile for a processor: its 8 MB fit the caches, and memory stays bounded."""


_NUMPY_REPEAT_MAX = 1 << 14
"""Number of values up to which `np.repeat` is used; for more, a cumulative sum releases the GIL, which other threads
need."""


def repeat_values(values: NDArray[np.int64], repeat_counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `np.repeat(values, counts)`, mostly without holding the GIL."""
    run_ends = np.cumsum(repeat_counts)
    if not len(run_ends) or run_ends[-1] <= _NUMPY_REPEAT_MAX:
        return np.repeat(values, repeat_counts)
    filled_indexes = np.flatnonzero(repeat_counts)
    value_steps = np.zeros(int(run_ends[-1]), np.int64)
    filled_values = values[filled_indexes]
    value_steps[(run_ends - repeat_counts)[filled_indexes]] = np.diff(filled_values, prepend=np.int64(0))
    return np.cumsum(value_steps, out=value_steps)


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    """Model indices of many histories: row r is `indices[indptr[r]:indptr[r + 1]]`, oldest first."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]

    @classmethod
    def of(cls, histories: Sequence[NDArray[np.int64] | Sequence[int]]) -> Self:
        """Build from one sequence per row."""
        lengths = np.fromiter((len(row) for row in histories), np.int64, len(histories))
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        if not indptr[-1]:
            return cls(indptr, np.empty(0, np.int64))
        return cls(indptr, np.concatenate([np.asarray(row, np.int64) for row in histories]))

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def select_rows(self, row_indexes: NDArray[np.int64]) -> Self:
        """Return the given rows, in the order given."""
        starts, ends = self.indptr[row_indexes], self.indptr[row_indexes + 1]
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])
        index_shifts = repeat_values(starts - indptr[:-1], ends - starts)
        return type(self)(indptr, self.indices[np.arange(indptr[-1]) + index_shifts])

    def pad_rows(
        self,
        row_indexes: NDArray[np.int64],
        padded_length: int,
        pad_value: int,
        dtype: str,
        matrix_buffer: NDArray[Any] | None = None,
    ) -> NDArray[np.int32] | NDArray[np.int64]:
        """Return a matrix [rows, padded_length], in the buffer if given: each row's last indices, then `pad_value`."""
        ends = self.indptr[row_indexes + 1]
        kept_counts = np.minimum(ends - self.indptr[row_indexes], padded_length)
        slot_indexes = np.arange(padded_length)
        used_mask = slot_indexes < kept_counts[:, None]
        matrix = np.empty((len(row_indexes), padded_length), dtype) if matrix_buffer is None else matrix_buffer
        matrix.fill(pad_value)
        matrix[used_mask] = self.indices[((ends - kept_counts)[:, None] + slot_indexes)[used_mask]]
        return matrix


Inputs = Mapping[str, Histories | NDArray[Any]]
"""Input arrays by the tower's input names; all have the same number of rows."""


def _error_remedy(error_text: str) -> str:
    """Return a remedy to append to an error of ONNX Runtime; empty if the error needs none."""
    if "Failed to construct locale" in error_text:
        return "; export it for the locale that every host has: options={TfidfVectorizer: {'locale': 'C'}}"
    return ""


class Tower:
    """ONNX Runtime session of one model; thread-safe, and a row's output does not depend on the other rows."""

    def __init__(
        self, session: ort.InferenceSession, spec: TowerSpec, padded_lengths: tuple[int, ...], model_name: str
    ) -> None:
        self.spec = spec
        self.name = model_name
        self.buckets = padded_lengths
        self.provider = first_provider_of(session)
        self._session = session
        self._buffers = _HistoryBuffers()

    @classmethod
    def open(
        cls,
        path: Path,
        spec: TowerSpec,
        *,
        threads: int = 1,
        cores: Sequence[int] = (),
        accelerator: Accelerator | None = None,
    ) -> Self:
        """Load a model; raise BundleError with both sides if a name, dtype or shape does not fit its specification.

        `threads` run one inference, including the caller's thread; the others are pinned to `cores`, if any are given.
        On an `accelerator`, if its provider can be loaded, other rows may change a row's last bits; see `provider`.
        """
        session_options = _session_options(threads, cores)
        providers = ["CPUExecutionProvider"] if accelerator is None else accelerator.session_providers()
        try:
            session = ort.InferenceSession(str(path), session_options, providers=providers)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            reason = " ".join(str(error).split())
            raise BundleError(
                f"{path.name} is not a model that ONNX Runtime opens: {reason}{_error_remedy(reason)}"
            ) from error
        return cls(session, spec, check_padded_lengths(path.name, session, spec), path.name)

    def run(self, model_inputs: Inputs) -> NDArray[np.float32]:
        """Run the model; return float32 [n, output_dims].

        Histories are padded to a length that depends only on their own length (powers of two up to `max_length`) and
        run in groups of equal padded length: neither padding nor the order of summation depends on the batch.
        """
        outputs = np.empty((row_count_of(model_inputs), self.spec.output_dims), np.float32)
        for row_indexes, feed in self.batches(model_inputs, self._buffers):
            outputs[row_indexes] = self.run_batch(feed)[: len(row_indexes)]
        return outputs

    def run_batch(self, feed: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Run the model for one batch of `batches`; raise ModelFailed, or MemoryError if memory is too small."""
        try:
            outputs: NDArray[np.float32] = self._session.run([self.spec.output], feed)[0]
        except Exception as error:  # ONNX Runtime's errors have no common base class
            if "allocate" in str(error) or "out of memory" in str(error):
                raise MemoryError(f"{self.name}: {error}") from error
            error_lines = str(error).strip().splitlines() or [type(error).__name__]
            input_shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in feed.items())
            raise ModelFailed(
                f"{self.name} cannot be run on {input_shapes}: {error_lines[-1]}", model=self.name
            ) from error
        return outputs

    def batches(
        self, model_inputs: Inputs, buffers: "_HistoryBuffers | None" = None, tile: Tile | None = None
    ) -> Iterator[tuple[NDArray[np.int64], dict[str, NDArray[Any]]]]:
        """Yield (row indexes, ONNX Runtime's input arrays) for each batch that `run` runs.

        A single row is passed twice, and its first output is used: for one row ONNX Runtime uses other code for sums
        and products, whose last bits differ. For a GPU, pass another `tile` than the processor's.
        """
        tile = tile or CPU_TILE
        histories = next(
            (input_values for input_values in model_inputs.values() if isinstance(input_values, Histories)), None
        )
        if histories is None:
            padded_lengths: tuple[int, ...] = (0,)
            length_bucket_by_row = np.zeros(row_count_of(model_inputs), np.int64)
        else:
            padded_lengths = self.buckets
            length_bucket_by_row = np.minimum(
                np.searchsorted(padded_lengths, np.diff(histories.indptr)), len(padded_lengths) - 1
            )
        for length_index in np.flatnonzero(np.bincount(length_bucket_by_row)).tolist():
            padded_length = padded_lengths[length_index]
            bucket_rows = np.flatnonzero(length_bucket_by_row == length_index)
            numbers_per_row = max(1, padded_length) * self.spec.output_dims
            rows_at_once = max(1, min(tile.rows_max, tile.numbers_max // numbers_per_row))
            for start in range(0, len(bucket_rows), rows_at_once):
                row_indexes = bucket_rows[start : start + rows_at_once]
                fed_rows = row_indexes if len(row_indexes) > 1 else np.repeat(row_indexes, 2)
                yield row_indexes, self._build_feed(model_inputs, fed_rows, padded_length, buffers)

    def _build_feed(
        self,
        model_inputs: Inputs,
        row_indexes: NDArray[np.int64],
        padded_length: int,
        buffers: "_HistoryBuffers | None",
    ) -> dict[str, NDArray[Any]]:
        feed: dict[str, NDArray[Any]] = {}
        for input_spec in self.spec.inputs:
            input_values = model_inputs[input_spec.name]
            if isinstance(input_values, Histories):
                buffer = None
                if buffers is not None:
                    buffer = buffers.matrix(input_spec.name, len(row_indexes), padded_length, input_spec.dtype)
                feed[input_spec.name] = input_values.pad_rows(
                    row_indexes, padded_length, input_spec.pad or 0, input_spec.dtype, buffer
                )
            elif input_spec.dtype == "string":
                feed[input_spec.name] = input_values[row_indexes].astype(object)
            else:
                feed[input_spec.name] = np.ascontiguousarray(input_values[row_indexes], input_spec.dtype)
        return feed


class _HistoryBuffers(threading.local):
    """Buffers for padded histories, per thread and input, sized for the largest batch so far and reused.

    The tile bounds a buffer to 16 MB.
    """

    def __init__(self) -> None:
        self._buffer_by_input: dict[str, NDArray[Any]] = {}

    def matrix(self, input_name: str, row_count: int, padded_length: int, dtype: str) -> NDArray[Any]:
        """Return an uninitialised matrix [rows, length], valid until the thread's next call for this input."""
        number_count = row_count * padded_length
        flat_buffer = self._buffer_by_input.get(input_name)
        if flat_buffer is None or len(flat_buffer) < number_count:
            flat_buffer = self._buffer_by_input[input_name] = np.empty(1 << (number_count - 1).bit_length(), dtype)
        return flat_buffer[:number_count].reshape(row_count, padded_length)


def _session_options(threads: int, cores: Sequence[int]) -> ort.SessionOptions:
    session_options = ort.SessionOptions()
    session_options.intra_op_num_threads = threads
    session_options.inter_op_num_threads = 1
    session_options.log_severity_level = (
        4  # errors are raised as exceptions; logging each value that an event set would fill the log
    )
    # A pool that spins while idle would take cores from the event loop.
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session_options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if cores and threads > 1:
        # ONNX Runtime numbers processors from 1, and needs a set for each thread except the caller's.
        thread_affinity = ",".join(str(core + 1) for core in cores)
        affinities = ";".join([thread_affinity] * (threads - 1))
        session_options.add_session_config_entry("session.intra_op_thread_affinities", affinities)
    return session_options


def row_count_of(model_inputs: Inputs) -> int:
    """Return the number of rows in a set of inputs."""
    return len(next(iter(model_inputs.values())))


def select_input_rows(model_inputs: Inputs, row_indexes: NDArray[np.int64]) -> Inputs:
    """Return the given rows of a set of inputs, in the order given."""
    return {
        name: input_values.select_rows(row_indexes)
        if isinstance(input_values, Histories)
        else input_values[row_indexes]
        for name, input_values in model_inputs.items()
    }


class AnyTower(Protocol):
    """Interface of a model with inputs bound by name."""

    spec: TowerSpec

    def run(self, model_inputs: Inputs) -> NDArray[np.float32]:
        """Run the model; return float32 [n, output_dims]."""


def run_isolating_failures(tower: AnyTower, model_inputs: Inputs) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return (outputs float32 [n, output_dims], mask of the rows on which the model raises, which are NaN).

    The model runs again on halves until each failing row is isolated; the other rows keep their outputs.
    """
    row_count = row_count_of(model_inputs)
    outputs = np.full((row_count, tower.spec.output_dims), np.nan, np.float32)
    failed_mask = np.zeros(row_count, np.bool_)
    pending_rows = [np.arange(row_count)] if row_count else []
    while pending_rows:
        row_indexes = pending_rows.pop()
        try:
            outputs[row_indexes] = tower.run(select_input_rows(model_inputs, row_indexes))
        except Exception:  # ONNX Runtime's errors have no common base class
            if len(row_indexes) == 1:
                failed_mask[row_indexes] = True
            else:
                pending_rows += [row_indexes[len(row_indexes) // 2 :], row_indexes[: len(row_indexes) // 2]]
    return outputs, failed_mask
