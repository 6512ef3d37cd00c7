"""Torch modules as ONNX models with inputs bound by name; traps between the two are refused with a remedy."""

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cache.errors import BundleError, SourceError
from cache.model.runtime import ort
from cache.model.tower import Histories
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles.onnx_model import (
    WEIGHTS_BYTES_MAX,
    OnnxModel,
    refuse_negative_codes,
)

OPSET = 18
"""Opset that torch writes without converting."""

PARITY_ROWS = (1, 2, 17)

PARITY_TOLERANCE = 1e-5
"""Difference of ONNX Runtime's output from torch's, relative to the row's largest number, or absolute below 1."""

ROWS_AT_ONCE = 4096

_SHORT = 16

_INDICES = {"history": "history", "item": "item_index", "user": "user_index"}

Feed = Mapping[str, NDArray[Any]]

Feeds = Callable[[int, int, int], Feed]
"""Inputs by name of so many rows, whose histories have so many items and are padded to such a length."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Inputs of both towers in the order of forward's arguments: tensors [n, ...] of values that occur, by name.

    `history` is a padded history of item indices, `item` an item's index, `user` a user's; any other name is a feature
    column. Of items and users the model knows the indices from `first_item` and `first_user` on, in the order of their
    ids, and `pad` is none of them. Larder pads behind a history, to powers of two; `is_fixed` to `max_length` always.
    """

    user: Mapping[str, Tensor]
    item: Mapping[str, Tensor]
    pad: int = -1
    max_length: int = 512
    is_fixed: bool = False
    first_item: int = 0
    first_user: int = 0


class BoundTower(nn.Module):  # type: ignore[misc]  # torch's own types are not looked at
    """Module whose inputs are Larder's: places of items and users counted from 0, the padding behind the last item."""

    def __init__(
        self,
        module: Any,
        inputs: Mapping[str, Tensor],
        example: Example,
        items: int,
        tower_name: str,
    ) -> None:
        super().__init__()
        demand_exportable(module, tower_name)
        if not inputs:
            raise SourceError(
                f"the example has no input of {tower_name}: name each argument of forward"
            )
        pad, first = example.pad, example.first_item
        if "history" in inputs and (pad < 0 or first <= pad < first + items):
            raise SourceError(
                f"pad is {pad}, which is "
                + (
                    f"one of the items {first} to {first + items - 1}"
                    if pad >= 0
                    else "no row of a table"
                )
                + ": name the index that the tower pads with; where 0 is padding, say first_item=1 in Example; wrap a "
                "tower that pads with another number: forward(torch.where(history == PAD, that, history))"
            )
        for name, value in inputs.items():
            is_wide = value.ndim == 2 and value.shape[1] > 1 and not value.is_floating_point()
            if tower_name == "the user tower" and is_wide and "history" not in inputs:
                raise SourceError(
                    f"the example's {name!r} holds rows of whole numbers: if these are items, call it history (forward "
                    "may call it as it likes); if not, make them float32"
                )
        self.module, self.names, self.example = module, tuple(inputs), example
        self.items, self.tower_name, self.inputs = items, tower_name, dict(inputs)
        self.eval()

    @property
    def pad(self) -> int:
        """Padding of a history as Larder sends it."""
        return self.items if self.example.first_item else self.example.pad

    def forward(self, *inputs: Tensor) -> Tensor:
        """Vectors [n, dims]."""
        return self.module(*map(self._shifted, self.names, inputs))

    def _shifted(self, name: str, value: Tensor) -> Tensor:
        first = self.example.first_user if name == "user" else self.example.first_item
        if name not in _INDICES or not first:
            return value
        if name == "history":
            return torch.where(value == self.items, self.example.pad, value + first)
        return value + first

    def feed(self, rows: int, items: int, length: int) -> Feed:
        """Inputs of so many rows: indices in turn, and the example's own values of features."""
        array_by_name = {}
        for name, value in self.inputs.items():
            dtype = _numpy_of(value, f"{self.tower_name}: input {name!r}")
            row_numbers = np.arange(rows)
            if name == "history":
                array_by_name[name] = np.full((rows, length), self.pad, dtype)
                array_by_name[name][:, :items] = (
                    row_numbers[:, None] * 7 + np.arange(items)
                ) % self.items
            elif name in _INDICES:
                array_by_name[name] = (
                    row_numbers % (self.items if name == "item" else len(value))
                ).astype(dtype)
            else:
                array_by_name[name] = np.ascontiguousarray(value.numpy()[row_numbers % len(value)])
        return array_by_name

    def run(
        self, ids: Any, features: Mapping[str, Any], histories: Histories | None = None
    ) -> NDArray[np.float32]:
        """Vectors of all ids (Arrow strings), by torch; `features` have a row for each.

        Raises SourceError, which names the first id on which the tower fails.
        """
        vector_batches = []
        for start in range(0, len(ids), ROWS_AT_ONCE):
            batch_rows = np.arange(start, min(start + ROWS_AT_ONCE, len(ids)))
            feed = {}
            for name, value in self.inputs.items():
                if name == "history":
                    assert histories is not None  # noqa: S101
                    dtype = str(_numpy_of(value, name))
                    feed[name] = histories.pad_rows(
                        batch_rows, self.example.max_length, self.pad, dtype
                    )
                elif name in _INDICES:
                    feed[name] = batch_rows.astype(_numpy_of(value, name))
                else:
                    feed[name] = np.ascontiguousarray(features[name][batch_rows])
            try:
                vector_batches.append(vectors_of(self, feed, self.tower_name))
            except SourceError:
                row = self._failing_row(feed, len(batch_rows))
                if row is None:
                    raise
                values = ", ".join(
                    f"{name} {feed[name][row]}" for name in self.inputs if name not in _INDICES
                )
                entity = self.tower_name.split()[1]
                subject = f"{entity} {ids[start + row].as_py()!r} with {values or 'its index'}"
                vectors_of(self, _one_row(feed, row), self.tower_name, subject)
                raise
        return np.concatenate(vector_batches)

    def _failing_row(self, feed: Feed, rows: int) -> int | None:
        """The first row on which the tower fails alone; None if it fails on every row, or on none alone."""
        fails = [self._fails(_one_row(feed, row)) for row in (0, rows - 1)]
        if all(fails):
            return None
        return next((row for row in range(rows) if self._fails(_one_row(feed, row))), None)

    def _fails(self, feed: Feed) -> bool:
        try:
            vectors_of(self, feed, self.tower_name)
        except SourceError:
            return True
        return False

    def spec(self, dims: int) -> TowerSpec:
        """Specification of the inputs and the output."""
        return TowerSpec(
            tuple(self._input(*named_input) for named_input in self.inputs.items()), "vector", dims
        )

    def _input(self, name: str, value: Tensor) -> InputSpec:
        dtype: Any = str(_numpy_of(value, f"{self.tower_name}: input {name!r}"))
        if name == "history":
            return InputSpec(
                name, "history", dtype, max_length=self.example.max_length, pad=self.pad
            )
        if name == "item":
            return InputSpec(name, "item_index", dtype)
        return InputSpec(
            name, "feature", dtype, column=name, width=value.shape[1] if value.ndim > 1 else None
        )


def export(tower: BoundTower) -> tuple[OnnxModel, TowerSpec, float]:
    """(model, its specification, largest difference from torch); SourceError or BundleError names a trap."""
    longest = tower.example.max_length
    short = longest if tower.example.is_fixed else min(_SHORT, longest)
    lengths = tuple(dict.fromkeys((short, longest)))
    length = longest if tower.example.is_fixed else max(2, short - 1)
    traced = 3, length  # not one row: torch takes an axis of one for one that is always so
    feed = tower.feed(traced[0], length, length)
    dims = vectors_of(tower, feed, tower.tower_name).shape[1]
    spec = tower.spec(dims)
    if spec.history is not None and len(lengths) > 1:
        demand_free_padding(tower, tower.feed, (short, longest), tower.tower_name)
    free: Any = torch.export.Dim.AUTO
    axes = {"history": 1 if tower.example.is_fixed else 2}
    shapes = tuple(dict.fromkeys(range(axes.get(name, 1)), free) for name in feed)
    try:
        with _for_export():
            program = torch.onnx.export(
                tower, tuple(map(torch.from_numpy, feed.values())), dynamo=True, dynamic_shapes=(shapes,),
                input_names=list(feed), output_names=[spec.output], opset_version=OPSET, external_data=False,
                verbose=False,
                optimize=False,
            )  # fmt: skip
    except ImportError as error:
        raise SourceError(f"torch.onnx needs {error.name}: pip install onnxscript") from None
    except Exception as error:  # torch's exporter lets through whatever happens inside of it
        raise BundleError(f"{tower.tower_name} {_describe_export_failure(error)}") from None
    model = _exported_model(program, [feature.name for feature in spec.features])
    return (
        model,
        spec,
        demand_parity(model, tower, spec, tower.feed, traced, lengths, tower.tower_name),
    )


def _exported_model(program: Any, features: Sequence[str]) -> OnnxModel:
    """The model of an export, without its stack traces, which name folders of the machine."""
    initializers = program.model.graph.initializers
    constants = {name: initializers.pop(name).const_value.numpy() for name in list(initializers)}
    model = program.model_proto
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    refuse_negative_codes(model.graph, constants, features)
    return OnnxModel.of(model, constants)


def _numpy_of(value: Tensor, subject: str) -> np.dtype[Any]:
    """Return the tensor's dtype for numpy; raise SourceError for a dtype that no input of a bundle has."""
    names = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}
    if value.dtype not in names:
        raise SourceError(
            f"{subject} is {value.dtype}: inputs are int32, int64 or float32; texts and flags become numbers first"
        )
    return np.dtype(names[value.dtype])


def _describe_export_failure(error: Exception) -> str:
    """Cause of a failed export, with the operator if it names one, and the remedy."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(map(str, causes))
    if operator_match := re.search(
        r"No (?:ONNX function|decompositions?) found for <?(?:OpOverload\(op=')?([\w.:]+)", text
    ):
        return (
            f"uses {operator_match[1]}, for which ONNX has no operator: write forward with others"
        )
    return f"cannot be exported: {first_line(causes[-1])}; forward must not decide by values of its inputs"


@contextmanager
def _for_export() -> Iterator[None]:
    """torch's log and warnings held back, and attention by plain operators: the fused one has no ONNX form."""
    log, fast = logging.getLogger("torch.onnx"), torch.backends.mha.get_fastpath_enabled()
    level = log.level
    log.setLevel(logging.ERROR)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own parts, about each other
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        log.setLevel(level)


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


def _one_row(feed: Feed, row: int) -> Feed:
    return {name: array[row : row + 1] for name, array in feed.items()}


def vectors_of(
    module: nn.Module, feed: Feed, tower_name: str, subject: str = ""
) -> NDArray[np.float32]:
    """Output float32 [n, dims] of the module; raises SourceError for anything else.

    `subject` names the entity of a feed of one row.
    """
    row_count = len(next(iter(feed.values())))
    try:
        with torch.no_grad():
            output = module(*(torch.from_numpy(array) for array in feed.values()))
    except Exception as error:  # whatever the caller's own code raises
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        remedy = "pad, max_length and the number of items must be those that it was trained with"
        if subject and feed.keys() - _INDICES.keys():
            remedy = "give the codes and numbers that it was trained with, whose codes begin at 0"
        raise SourceError(
            f"{tower_name} fails on {subject or shapes}: {first_line(error)}; {remedy}"
        ) from None
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or len(output) != row_count:
        shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise SourceError(
            f"{tower_name} returns {shape} for {row_count} rows, not [{row_count}, dims]: wrap it in a module whose "
            "forward returns one vector a row"
        )
    vectors: NDArray[np.float32] = output.numpy()
    is_nonfinite = ~np.isfinite(vectors).all(axis=1)
    if is_nonfinite.any():
        raise SourceError(
            f"{tower_name} returns NaN or infinity, first "
            f"{f'for {subject}' if subject else f'in row {int(is_nonfinite.argmax())}'}: was it trained to its "
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
    if (error := _relative_error(long_vectors, short_vectors)) > PARITY_TOLERANCE:
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
    """Largest difference between ONNX Runtime and torch; BundleError for a frozen dimension or one above the tolerance.

    Run at 1, 2 and 17 rows, with histories of 1 (with features beside it: 0), half and all of each padded length.
    `traced` are the rows and the length that the export saw.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tower.onnx"
            model.write(path)
            session = ort.InferenceSession(
                str(path), _quiet_session_options(), providers=["CPUExecutionProvider"]
            )
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
            _relative_error(onnx_vectors, torch_vectors)
            if onnx_vectors.shape == torch_vectors.shape
            else float("inf")
        )

    worst, min_items = 0.0, 0 if spec.features else 1
    for length in lengths:
        for rows in PARITY_ROWS:
            for items in sorted({min_items, (length + 1) // 2, length}):
                difference = off(rows, items, length)
                if not difference <= PARITY_TOLERANCE:
                    raise BundleError(
                        _parity_message(
                            off, spec, traced, (rows, items, length), difference, tower_name
                        )
                    )
                worst = max(worst, difference)
    return worst


def _parity_message(
    off: Callable[[int, int, int], float],
    spec: TowerSpec,
    traced: tuple[int, int],
    at: tuple[int, int, int],
    difference: float,
    tower_name: str,
) -> str:
    """Message about the axis whose change alone makes a difference, or about the difference itself."""
    rows, length = traced
    if off(rows, length, length) <= PARITY_TOLERANCE:
        remedy = "take sizes from tensors in forward (x.shape), not from Python numbers"
        if not off(PARITY_ROWS[-1], length, length) <= PARITY_TOLERANCE:
            return f"{tower_name}: input {spec.inputs[0].name!r} has axis 0 (rows) frozen at {rows}: {remedy}"
        if spec.history is not None and not off(rows, at[2], at[2]) <= PARITY_TOLERANCE:
            return (
                f"{tower_name}: input {spec.history.name!r} has axis 1 (length) frozen at {length}: {remedy}, or say "
                "is_fixed=True in Example"
            )
    on = f"{at[0]} rows" + (f" with {at[1]} of {at[2]} items" if spec.history else "")
    return (
        f"{tower_name} differs from its ONNX model by {difference:.2g} on {on} ({PARITY_TOLERANCE:g} is allowed): "
        "forward must not decide by Python numbers made of its inputs"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".: ")


def _relative_error(
    actual_vectors: NDArray[np.float32], expected_vectors: NDArray[np.float32]
) -> float:
    scale = np.maximum(np.abs(expected_vectors).max(axis=1, keepdims=True), 1.0)
    return float((np.abs(actual_vectors - expected_vectors) / scale).max())


def _quiet_session_options() -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options
