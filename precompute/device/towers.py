"""A tower on a GPU: fed in batches of its size, and compared with its ONNX file on the processor."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cache.errors import BundleError
from cache.model.tower import Inputs, Tile, Tower, rows_of, rows_taken

AGREEMENT = 1e-4
"""Largest deviation of a tower on a device from its ONNX file on the processor, relative to the largest number of the
row: what the gates `exact_numbers` and `item_vectors` allow."""
LENGTH_AGREEMENT = 8e-6
"""Length of the deviation of a user's vector, relative to the vector's. Two scores of a list then differ by twice this
at most, which together with the rounding of their sums is what the gate `exact_lists` allows."""
OF_DEVICE = Tile(1 << 14, 1 << 27)
"""Tile of a GPU: a whole chunk of users with short histories, 512 MiB of float32 for what is gathered."""
_OF_VECTORS = "user_tower"
_COMPARED = 64

_log = logging.getLogger(__name__)


class OnTheDevice(Protocol):
    """A form of a model on its device."""

    def outputs(self, feeds: Iterable[Sequence[NDArray[Any]]]) -> Iterator[NDArray[np.float32]]:
        """Outputs of each batch of inputs, in its own order; raises MemoryError where the device has no room."""


class OnnxOnGpu:
    """The ONNX file itself, by ONNX Runtime's provider for the GPU."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self._names = [input_spec.name for input_spec in tower.spec.inputs]

    def outputs(self, feeds: Iterable[Sequence[NDArray[Any]]]) -> Iterator[NDArray[np.float32]]:
        """Outputs of each batch; raises MemoryError where the provider's arena is full."""
        for feed in feeds:
            try:
                yield self._tower.fed(dict(zip(self._names, feed, strict=True)))
            except Exception as error:  # ONNX Runtime's errors share no base class of their own
                if "allocate" not in str(error) and "out of memory" not in str(error):
                    raise
                raise MemoryError(str(error)) from error


class DeviceTower:
    """A model on a device, fed like its ONNX file, and compared with it on the first rows that it is given.

    Where it `may_stay`, because nobody asked for this form of it, it runs on the processor if they disagree.
    """

    def __init__(
        self, name: str, tower: Tower, running: OnTheDevice, *, may_stay: bool = False
    ) -> None:
        self.spec = tower.spec
        self._name = name
        self._tower = tower
        self._running = running
        self._names = [input_spec.name for input_spec in tower.spec.inputs]
        self._tile = OF_DEVICE
        self._is_compared = False
        self._may_stay = may_stay
        self._stays = False

    def run(self, inputs: Inputs) -> NDArray[np.float32]:
        """Outputs float32 [n, output_dims]; raises BundleError where the device and the processor disagree."""
        outputs = None
        try:
            if not (self._is_compared or self._stays):
                self._compare(inputs)
            if not self._stays:
                outputs = self._tried(inputs)
        except BundleError as error:
            if not self._may_stay:
                raise
            self._stay(error.message)
        except RuntimeError as error:
            from precompute.config.device_failures import is_of_device  # torch: here it was used

            if not is_of_device(error):
                raise
            self._stay(str(error))
        return self._tower.run(inputs) if outputs is None else outputs

    def _stay(self, reason: str) -> None:
        self._stays = True
        _log.warning("%s stays on the processor: %s", self._name, reason)

    def _tried(self, inputs: Inputs) -> NDArray[np.float32] | None:
        """Outputs of the device; None where it has no room for one row."""
        outputs = np.empty((rows_of(inputs), self.spec.output_dims), np.float32)
        while True:
            tile = self._tile
            try:
                self._fill(outputs, inputs, tile)
            except MemoryError as error:
                if tile.rows == 1:
                    _log.warning("%s: %s; ONNX Runtime goes on", self._name, error)
                    return None
                self._tile = tile.halved()  # of several callers each halves what it tried
                _log.info("%s: out of memory with %s; going on with half", self._name, tile)
            else:
                return outputs

    def _fill(self, outputs: NDArray[np.float32], inputs: Inputs, tile: Tile) -> None:
        numbers: list[NDArray[np.int64]] = []

        def feeds() -> Iterator[Sequence[NDArray[Any]]]:
            for rows, feed in self._tower.batches(inputs, tile=tile):
                numbers.append(rows)
                yield [feed[name] for name in self._names]

        for batch_index, batch_outputs in enumerate(self._running.outputs(feeds())):
            outputs[numbers[batch_index]] = batch_outputs[: len(numbers[batch_index])]

    def _compare(self, inputs: Inputs) -> None:
        """Compares a few rows, but for those that are finite on neither: they get no answer."""
        rows = np.arange(min(_COMPARED, rows_of(inputs)))
        probe_inputs = rows_taken(inputs, rows)
        expected_outputs, device_outputs = self._tower.run(probe_inputs), self._tried(probe_inputs)
        if device_outputs is None:
            return
        finite = np.isfinite(expected_outputs).all(axis=1)
        has_same_finite_rows = np.array_equal(finite, np.isfinite(device_outputs).all(axis=1))
        expected_outputs, off = (
            expected_outputs[finite],
            device_outputs[finite] - expected_outputs[finite],
        )
        largest = _worst(np.abs(off).max(axis=1), np.abs(expected_outputs).max(axis=1))
        self._demand(
            largest if has_same_finite_rows else float("nan"), AGREEMENT, "a row's largest number"
        )
        if self._name == _OF_VECTORS:
            lengths = _worst(np.linalg.norm(off, axis=1), np.linalg.norm(expected_outputs, axis=1))
            self._demand(lengths, LENGTH_AGREEMENT, "a vector's length")
        self._is_compared = len(expected_outputs) > 0

    def _demand(self, error: float, threshold: float, of: str) -> None:
        if error <= threshold:
            return
        raise BundleError(
            f"{self._name} on the device differs from its ONNX file on the processor by {error:.2g} of {of}, at most "
            f"{threshold:g} is allowed: export both from the same weights in float32, or set device to `off`",
            model=self._name,
            value=error,
            threshold=threshold,
        )


def _worst(errors: NDArray[np.float32], sizes: NDArray[np.float32]) -> float:
    return float((errors / np.maximum(sizes, np.float32(1e-30))).max(initial=0))
