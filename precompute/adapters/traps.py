"""Traps between a torch module and its ONNX model, each refused in one line that names the remedy."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cache.errors import BundleError, SourceError
from cache.model.runtime import ort
from cache.model.tower_spec import TowerSpec
from precompute.bundles.onnx_model import WEIGHTS_BYTES_MAX, OnnxModel

ROWS = (1, 2, 17)
TOLERANCE = 1e-5
"""Difference of ONNX Runtime's output from torch's, relative to the row's largest number, or absolute below 1."""

Feed = Mapping[str, NDArray[Any]]
Feeds = Callable[[int, int, int], Feed]
"""Inputs by name of so many rows, whose histories have so many items and are padded to such a length."""


def demand_exportable(module: Any, tower_name: str) -> None:
    """Raises SourceError or BundleError for a module whose export would be wrong or impossible; nothing is run."""
    if isinstance(module, torch.jit.ScriptModule):
        raise SourceError(
            f"{tower_name} is a scripted module, which torch.onnx no longer takes: give the nn.Module that it was made "
            "of"
        )
    if not isinstance(module, nn.Module):
        raise SourceError(
            f"{tower_name} is a {type(module).__name__}: give an nn.Module whose forward returns vectors [n, dims]"
        )
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > WEIGHTS_BYTES_MAX:
        raise BundleError(
            f"{tower_name} has {size:,} bytes of weights, {WEIGHTS_BYTES_MAX:,} at most: use fewer dimensions",
            bytes=size,
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise SourceError(
                f"{tower_name}: {name} is {tensor.dtype}: call .float() on it before the import"
            )
        if tensor.device.type != "cpu":
            raise SourceError(
                f"{tower_name}: {name} is on {tensor.device}: call .cpu() on it before the import"
            )
    if any(submodule.training for submodule in module.modules()):
        raise SourceError(
            f"{tower_name} is in training mode, where dropout and batch norm change what it says: call .eval() on it"
        )


def vectors_of(module: nn.Module, feed: Feed, tower_name: str) -> NDArray[np.float32]:
    """Output float32 [n, dims] of the module; raises SourceError for anything else."""
    rows = len(next(iter(feed.values())))
    try:
        with torch.no_grad():
            output = module(*(torch.from_numpy(array) for array in feed.values()))
    except Exception as error:  # whatever the caller's own code raises
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        raise SourceError(
            f"{tower_name} fails on {shapes}: {first_line(error)}; pad, max_length and the number of items must be "
            "those "
            "that it was trained with"
        ) from None
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or len(output) != rows:
        shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise SourceError(
            f"{tower_name} returns {shape} for {rows} rows, not [{rows}, dims]: wrap it in a module whose forward "
            "returns "
            "one vector a row"
        )
    vectors: NDArray[np.float32] = output.numpy()
    is_nonfinite = ~np.isfinite(vectors).all(axis=1)
    if is_nonfinite.any():
        raise SourceError(
            f"{tower_name} returns NaN or infinity, first in row {int(is_nonfinite.argmax())}: was it trained to its "
            "end, and does it "
            "mask padding without dividing by 0?"
        )
    return vectors


def demand_free_padding(
    module: nn.Module, feeds: Feeds, lengths: tuple[int, int], tower_name: str
) -> None:
    """Raises SourceError where the vector of a history depends on how much padding follows it."""
    short, long = lengths
    items = max(1, short // 2)
    short_vectors, long_vectors = (
        vectors_of(module, feeds(17, items, length), tower_name) for length in lengths
    )
    if (error := _error(long_vectors, short_vectors)) > TOLERANCE:
        raise SourceError(
            f"{tower_name}: the vector of a history of {items} changes by {error:.1g} if it is padded behind to {long} "
            f"instead of {short}: mask the padding in forward, or say is_fixed=True in Example, which always pads to "
            "max_length"
        )


def demand_parity(
    model: OnnxModel,
    module: nn.Module,
    spec: TowerSpec,
    feeds: Feeds,
    traced: tuple[int, int],
    lengths: tuple[int, ...],
    tower_name: str,
) -> float:
    """Largest difference between ONNX Runtime and torch; BundleError for a frozen dimension or one above TOLERANCE.

    Run at 1, 2 and 17 rows, with histories of 1 (with features beside it: 0), half and all of each padded length.
    `traced` are the rows and the length that the export saw.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tower.onnx"
            model.write(path)
            session = ort.InferenceSession(str(path), _quiet(), providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors share no base class of their own
        raise BundleError(
            f"{tower_name}: ONNX Runtime does not open its model: {first_line(error)}; write forward with other "
            "operators"
        ) from None

    def off(rows: int, items: int, length: int) -> float:
        feed = feeds(rows, items, length)
        torch_vectors = vectors_of(module, feed, tower_name)
        try:
            onnx_vectors = session.run([spec.output], dict(feed))[0]
        except Exception:  # as above; of a shape that the model does not take
            return float("inf")
        return (
            _error(onnx_vectors, torch_vectors)
            if onnx_vectors.shape == torch_vectors.shape
            else float("inf")
        )

    worst, min_items = 0.0, 0 if spec.features else 1
    for length in lengths:
        for rows in ROWS:
            for items in sorted({min_items, (length + 1) // 2, length}):
                difference = off(rows, items, length)
                if not difference <= TOLERANCE:
                    raise BundleError(
                        _describe_mismatch(
                            off, spec, traced, (rows, items, length), difference, tower_name
                        )
                    )
                worst = max(worst, difference)
    return worst


def _describe_mismatch(
    off: Callable[[int, int, int], float],
    spec: TowerSpec,
    traced: tuple[int, int],
    at: tuple[int, int, int],
    difference: float,
    tower_name: str,
) -> str:
    """Message about the axis whose change alone makes a difference, or about the difference itself."""
    rows, length = traced
    if off(rows, length, length) <= TOLERANCE:
        remedy = "take sizes from tensors in forward (x.shape), not from Python numbers"
        if not off(ROWS[-1], length, length) <= TOLERANCE:
            return f"{tower_name}: input {spec.inputs[0].name!r} has axis 0 (rows) frozen at {rows}: {remedy}"
        if spec.history is not None and not off(rows, at[2], at[2]) <= TOLERANCE:
            return (
                f"{tower_name}: input {spec.history.name!r} has axis 1 (length) frozen at {length}: {remedy}, or say "
                "is_fixed=True in Example"
            )
    on = f"{at[0]} rows" + (f" with {at[1]} of {at[2]} items" if spec.history else "")
    return (
        f"{tower_name} differs from its ONNX model by {difference:.2g} on {on} ({TOLERANCE:g} is allowed): forward "
        "must not "
        "decide by Python numbers made of its inputs"
    )


def first_line(error: BaseException) -> str:
    """First line of what an error says, at most 200 characters of it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".: ")


def _error(actual_vectors: NDArray[np.float32], expected_vectors: NDArray[np.float32]) -> float:
    scale = np.maximum(np.abs(expected_vectors).max(axis=1, keepdims=True), 1.0)
    return float((np.abs(actual_vectors - expected_vectors) / scale).max())


def _quiet() -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options
