"""The towers of a night: on the processor by ONNX Runtime, or on a GPU, where one of their two forms runs there."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cache.errors import LarderError, SourceError
from cache.model.runtime import Accelerator
from cache.model.tower import AnyTower, Inputs, Tower, rows_of, rows_taken
from cache.process.host import usable_cores
from precompute.builds.build import Build, fetch_model, open_bundle
from precompute.bundles.bundle import BundleModel
from precompute.bundles.digests import demand_sha256
from precompute.config.devices import AUTO, share_memory
from precompute.device.towers import DeviceTower, OnnxOnGpu, OnTheDevice
from precompute.sources.unusable import format_case_value

_log = logging.getLogger(__name__)


def open_tower(build: Build, model: BundleModel, device: str | None) -> AnyTower:
    """A model of the build, on the device of torch that is named or (None) the processor.

    On a device the bundle's program runs, without one ONNX Runtime's CUDA provider; without either the processor does.
    """
    path, threads = fetch_model(build, model), build.config.threads or usable_cores()
    tower = Tower.open(path, model.spec, threads=threads)
    if device is None:
        return tower
    running = _on_device(build, model, device)
    if isinstance(running, str):
        _log.info("%s stays on the processor: %s", model.name, running)
        return tower
    may_stay = build.config.device == AUTO and model.program is None
    return DeviceTower(model.name, tower, running, may_stay=may_stay)


def _on_device(build: Build, model: BundleModel, device: str) -> OnTheDevice | str:
    """The form of a model that runs on a device, or why none does."""
    if model.program is not None:
        demand_sha256(model.program, model.program_sha256)
        from precompute.bundles.program import Program

        return Program.open(
            model.program, [input_spec.name for input_spec in model.spec.inputs], device
        )
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return f"its bundle has no program, and {device} is no GPU"
    accelerator = Accelerator("cuda", int(number))
    if (reason := accelerator.missing()) is not None:
        return f"its bundle has no program, and {reason}"
    # Each such model has an arena of its own, and torch is one more.
    arenas = 1 + sum(bundle_model.program is None for bundle_model in open_bundle(build).models)
    limit_bytes = share_memory(device, build.config.device_tasks * arenas)
    accelerator = replace(accelerator, limit_bytes=limit_bytes)
    gpu_tower = Tower.open(fetch_model(build, model), model.spec, accelerator=accelerator)
    if gpu_tower.provider != accelerator.provider:
        return (
            f"its bundle has no program, and ONNX Runtime could not load its provider for {device}"
        )
    return OnnxOnGpu(gpu_tower)


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
            str(feature.column): np.asarray(inputs[feature.name])[row]
            for feature in tower.spec.features
        }
        inputs_text = ", ".join(
            f"{column} {format_case_value(value)}" for column, value in values.items()
        )
        error_lines = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise SourceError(
            f"{name(row)}: the model cannot be run on {inputs_text or 'its input'} "
            f"({format_case_value(error_lines[0])}); correct "
            "the table, or "
            "leave the value out of it",
            columns=sorted(values),
        ) from error


def _raises(tower: AnyTower, inputs: Inputs, rows: NDArray[np.int64]) -> bool:
    try:
        tower.run(rows_taken(inputs, rows))
    except Exception:
        return True
    return False
