"""The towers of a night: ONNX Runtime, or on a torch device the program that the bundle carries beside it."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cache.errors import BundleError, LarderError, SourceError
from cache.model.tower import AnyTower, Inputs, Tower, rows_of, rows_taken
from cache.process.host import usable_cores
from precompute.builds.build import Build, fetch_model
from precompute.bundles.bundle import BundleModel
from precompute.bundles.digests import demand_sha256
from precompute.sources.unusable import shown

AGREEMENT = 1e-4
"""Largest deviation of a program from its ONNX file, relative to the largest number of the row."""
_COMPARED = 64

_log = logging.getLogger(__name__)


class Running(Protocol):
    """A program on its device."""

    def run(self, feed: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """Its output for inputs in its own order; raises MemoryError where the device has no room for them."""


def open_tower(build: Build, model: BundleModel, device: str | None) -> AnyTower:
    """A model of the build, on the device of torch that is named or (None) the processor."""
    path, threads = fetch_model(build, model), build.config.threads or usable_cores()
    gpu = int(device.partition(":")[2]) if device and device.startswith("cuda:") else None
    tower = Tower.open(path, model.spec, threads=threads, gpu=gpu)
    if device is None or model.program is None:
        return tower
    demand_sha256(model.program, model.program_sha256)
    from precompute.bundles.program import Program

    names = [each.name for each in model.spec.inputs]
    return ProgramTower(model.name, tower, Program.open(model.program, names, device), names)


class ProgramTower:
    """A program fed like its ONNX file, and compared with it on the first rows that it is given."""

    def __init__(self, name: str, tower: Tower, program: Running, names: Sequence[str]) -> None:
        self.spec = tower.spec
        self._name = name
        self._tower = tower
        self._program = program
        self._names = names
        self._is_compared = False

    def run(self, inputs: Inputs) -> NDArray[np.float32]:
        """Outputs float32 [n, output_dims]; raises BundleError where the two forms of the model disagree."""
        if not self._is_compared:
            self._compare(inputs)
        return self._outputs(inputs)

    def _outputs(self, inputs: Inputs) -> NDArray[np.float32]:
        out = np.empty((rows_of(inputs), self.spec.output_dims), np.float32)
        try:
            for rows, feed in self._tower.batches(inputs):
                out[rows] = self._program.run([feed[name] for name in self._names])[: len(rows)]
        except MemoryError as error:
            _log.warning("%s: %s; ONNX Runtime goes on", self._name, error)
            return self._tower.run(inputs)
        return out

    def _compare(self, inputs: Inputs) -> None:
        rows = np.arange(min(_COMPARED, rows_of(inputs)))
        some = rows_taken(inputs, rows)
        wanted, found = self._tower.run(some), self._outputs(some)
        largest = np.maximum(np.abs(wanted).max(axis=1), 1e-30)
        error = float((np.abs(found - wanted).max(axis=1) / largest).max(initial=0))
        if not error <= AGREEMENT:
            raise BundleError(
                f"the program of {self._name} differs from its ONNX file by {error:.2g} of a row's largest number, at "
                f"most {AGREEMENT:g} is allowed: export both from the same weights",
                model=self._name,
                value=error,
                threshold=AGREEMENT,
            )
        self._is_compared = True


def run_named(tower: AnyTower, inputs: Inputs, name: Callable[[int], str]) -> NDArray[np.float32]:
    """Outputs float32 [n, output_dims]; raises SourceError naming the first row on which the model cannot be run.

    `name` is of a row, such as "user 'ann'".
    """
    try:
        return tower.run(inputs)
    except LarderError:
        raise
    except Exception as error:
        rows = np.arange(rows_of(inputs))
        while len(rows) > 1:
            half = rows[: len(rows) // 2]
            rows = half if _raises(tower, inputs, half) else rows[len(rows) // 2 :]
        if not _raises(tower, inputs, rows):
            raise  # it was not of a row: no memory, say
        row = int(rows[0])
        values = {
            str(each.column): np.asarray(inputs[each.name])[row] for each in tower.spec.features
        }
        told = ", ".join(f"{column} {shown(value)}" for column, value in values.items())
        why = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise SourceError(
            f"{name(row)}: the model cannot be run on {told or 'its input'} ({shown(why[0])}); correct the table, or "
            "leave the value out of it",
            columns=sorted(values),
        ) from error


def _raises(tower: AnyTower, inputs: Inputs, rows: NDArray[np.int64]) -> bool:
    try:
        tower.run(rows_taken(inputs, rows))
    except Exception:
        return True
    return False
