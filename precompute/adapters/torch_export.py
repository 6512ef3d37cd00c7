"""Export of torch modules to ONNX models with inputs bound by name; known causes of wrong exports are refused."""

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
from precompute.bundles.onnx_model import WEIGHTS_BYTES_MAX, OnnxModel, refuse_negative_codes

EXPORT_OPSET = 18
"""ONNX opset that torch exports without a conversion."""

PARITY_ROWS = (1, 2, 17)

PARITY_TOLERANCE = 1e-5
"""Difference of ONNX Runtime's output from torch's, relative to the row's largest number, or absolute below 1."""

ROWS_AT_ONCE = 4096

_SHORT_HISTORY_ITEMS = 16

_BINDING_BY_INPUT = {"history": "history", "item": "item_index", "user": "user_index"}

ArraysByInput = Mapping[str, NDArray[Any]]

MakeArrays = Callable[[int, int, int], ArraysByInput]
"""Inputs by name, from the number of rows, the number of items of each history, and the length to pad histories to."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Example inputs of both towers by name, in the order of forward's arguments: tensors [n, ...] of realistic values.

    `history` is a padded history of item indices, `item` an item's index, `user` a user's index; any other name is a
    feature column. The model's indices of items and users start at `first_item` and `first_user`, in the order of the
    ids; `pad` is the index of padding, and of no item. Larder appends padding to a history, up to a power of
    two; if `is_fixed`, always up to `max_length`.
    """

    user: Mapping[str, Tensor]
    item: Mapping[str, Tensor]
    pad: int = -1
    max_length: int = 512
    is_fixed: bool = False
    first_item: int = 0
    first_user: int = 0


class BoundTower(nn.Module):  # type: ignore[misc]  # torch's own types are not looked at
    """Module with Larder's inputs: positions of items and users from 0, and the number of items as padding."""

    def __init__(
        self, module: Any, example_by_input: Mapping[str, Tensor], example: Example, item_count: int, tower_name: str
    ) -> None:
        super().__init__()
        demand_exportable(module, tower_name)
        if not example_by_input:
            raise SourceError(f"the example has no input for {tower_name}: name each argument of forward")
        pad, first_item = example.pad, example.first_item
        if "history" in example_by_input and (pad < 0 or first_item <= pad < first_item + item_count):
            raise SourceError(
                f"pad is {pad}, which is "
                + (
                    f"one of the items {first_item} to {first_item + item_count - 1}"
                    if pad >= 0
                    else "no row of a table"
                )
                + (
                    ": give the index that the tower uses as padding; if that is 0, set first_item=1 in Example; if "
                    "it is another number, wrap the tower: forward(torch.where(history == PAD, that, history))"
                )
            )
        for name, example_tensor in example_by_input.items():
            is_wide = (
                example_tensor.ndim == 2 and example_tensor.shape[1] > 1 and not example_tensor.is_floating_point()
            )
            if tower_name == "the user tower" and is_wide and "history" not in example_by_input:
                raise SourceError(
                    f"the example's {name!r} has rows of integers: if these are items, name it history (the argument "
                    "of forward may have another name); if not, make them float32"
                )
        self.module, self.names, self.example = module, tuple(example_by_input), example
        self.items, self.tower_name, self.inputs = item_count, tower_name, dict(example_by_input)
        self.eval()

    @property
    def padding_index(self) -> int:
        """Index with which Larder pads a history."""
        return self.items if self.example.first_item else self.example.pad

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return vectors [n, dims]."""
        return self.module(*map(self._to_model_index, self.names, inputs))

    def _to_model_index(self, input_name: str, input_tensor: Tensor) -> Tensor:
        first_index = self.example.first_user if input_name == "user" else self.example.first_item
        if input_name not in _BINDING_BY_INPUT or not first_index:
            return input_tensor
        if input_name == "history":
            return torch.where(input_tensor == self.items, self.example.pad, input_tensor + first_index)
        return input_tensor + first_index

    def feed(self, row_count: int, item_count: int, padded_length: int) -> ArraysByInput:
        """Return test inputs for this many rows: successive indices, and the example's own feature values."""
        array_by_name = {}
        for name, example_tensor in self.inputs.items():
            dtype = _numpy_dtype_of(example_tensor, f"{self.tower_name}: input {name!r}")
            row_numbers = np.arange(row_count)
            if name == "history":
                array_by_name[name] = np.full((row_count, padded_length), self.padding_index, dtype)
                array_by_name[name][:, :item_count] = (row_numbers[:, None] * 7 + np.arange(item_count)) % self.items
            elif name in _BINDING_BY_INPUT:
                array_by_name[name] = (row_numbers % (self.items if name == "item" else len(example_tensor))).astype(
                    dtype
                )
            else:
                array_by_name[name] = np.ascontiguousarray(example_tensor.numpy()[row_numbers % len(example_tensor)])
        return array_by_name

    def run(
        self, entity_ids: Any, features: Mapping[str, Any], histories: Histories | None = None
    ) -> NDArray[np.float32]:
        """Return the vectors of all ids (Arrow strings), computed by torch; `features` have a row for each id.

        Raises SourceError, which names the first id on which the tower fails.
        """
        vector_batches = []
        for first_row in range(0, len(entity_ids), ROWS_AT_ONCE):
            batch_rows = np.arange(first_row, min(first_row + ROWS_AT_ONCE, len(entity_ids)))
            array_by_input = {}
            for name, example_tensor in self.inputs.items():
                if name == "history":
                    assert histories is not None  # noqa: S101
                    dtype = str(_numpy_dtype_of(example_tensor, name))
                    array_by_input[name] = histories.pad_rows(
                        batch_rows, self.example.max_length, self.padding_index, dtype
                    )
                elif name in _BINDING_BY_INPUT:
                    array_by_input[name] = batch_rows.astype(_numpy_dtype_of(example_tensor, name))
                else:
                    array_by_input[name] = np.ascontiguousarray(features[name][batch_rows])
            try:
                vector_batches.append(run_module(self, array_by_input, self.tower_name))
            except SourceError:
                row = self._failing_row(array_by_input, len(batch_rows))
                if row is None:
                    raise
                values_text = ", ".join(
                    f"{name} {array_by_input[name][row]}" for name in self.inputs if name not in _BINDING_BY_INPUT
                )
                entity_kind = self.tower_name.split()[1]
                subject = f"{entity_kind} {entity_ids[first_row + row].as_py()!r} with {values_text or 'its index'}"
                run_module(self, _select_one_row(array_by_input, row), self.tower_name, subject)
                raise
        return np.concatenate(vector_batches)

    def _failing_row(self, array_by_input: ArraysByInput, row_count: int) -> int | None:
        """Return the first row on which the tower fails; None if both the first and the last fail, or no row does."""
        edge_rows_fail = [self._fails_on_inputs(_select_one_row(array_by_input, row)) for row in (0, row_count - 1)]
        if all(edge_rows_fail):
            return None
        return next(
            (row for row in range(row_count) if self._fails_on_inputs(_select_one_row(array_by_input, row))), None
        )

    def _fails_on_inputs(self, array_by_input: ArraysByInput) -> bool:
        try:
            run_module(self, array_by_input, self.tower_name)
        except SourceError:
            return True
        return False

    def spec(self, dims: int) -> TowerSpec:
        """Return the specification of the inputs and the output."""
        return TowerSpec(tuple(self._input_spec(*named_input) for named_input in self.inputs.items()), "vector", dims)

    def _input_spec(self, input_name: str, example_tensor: Tensor) -> InputSpec:
        dtype: Any = str(_numpy_dtype_of(example_tensor, f"{self.tower_name}: input {input_name!r}"))
        if input_name == "history":
            return InputSpec(input_name, "history", dtype, max_length=self.example.max_length, pad=self.padding_index)
        if input_name == "item":
            return InputSpec(input_name, "item_index", dtype)
        return InputSpec(
            input_name,
            "feature",
            dtype,
            column=input_name,
            width=example_tensor.shape[1] if example_tensor.ndim > 1 else None,
        )


def export_tower(tower: BoundTower) -> tuple[OnnxModel, TowerSpec, float]:
    """Return (model, specification, largest difference from torch); raise SourceError or BundleError if it is wrong."""
    history_items_max = tower.example.max_length
    short_length = history_items_max if tower.example.is_fixed else min(_SHORT_HISTORY_ITEMS, history_items_max)
    padded_lengths = tuple(dict.fromkeys((short_length, history_items_max)))
    traced_length = history_items_max if tower.example.is_fixed else max(2, short_length - 1)
    traced_shape = (3, traced_length)  # at least two rows: torch takes an axis of length 1 as constant
    array_by_input = tower.feed(traced_shape[0], traced_length, traced_length)
    dims = run_module(tower, array_by_input, tower.tower_name).shape[1]
    spec = tower.spec(dims)
    if spec.history is not None and len(padded_lengths) > 1:
        demand_free_padding(tower, tower.feed, (short_length, history_items_max), tower.tower_name)
    free_dimension: Any = torch.export.Dim.AUTO
    free_axis_count = {"history": 1 if tower.example.is_fixed else 2}
    dynamic_shapes = tuple(
        dict.fromkeys(range(free_axis_count.get(name, 1)), free_dimension) for name in array_by_input
    )
    try:
        with _quiet_export():
            program = torch.onnx.export(
                tower, tuple(map(torch.from_numpy, array_by_input.values())), dynamo=True,
                dynamic_shapes=(dynamic_shapes,),
                input_names=list(array_by_input), output_names=[spec.output], opset_version=EXPORT_OPSET,
                external_data=False,
                verbose=False,
                optimize=False,
            )  # fmt: skip
    except ImportError as error:
        raise SourceError(f"torch.onnx needs {error.name}: pip install onnxscript") from None
    except Exception as error:  # torch's exporter raises exceptions of any class
        raise BundleError(f"{tower.tower_name} {_describe_export_failure(error)}") from None
    model = _exported_model(program, [feature.name for feature in spec.features])
    return (model, spec, demand_parity(model, tower, spec, tower.feed, traced_shape, padded_lengths, tower.tower_name))


def _exported_model(exported_program: Any, feature_names: Sequence[str]) -> OnnxModel:
    """Return the exported model without stack traces, which contain paths of this machine."""
    initializers = exported_program.model.graph.initializers
    constants = {name: initializers.pop(name).const_value.numpy() for name in list(initializers)}
    model = exported_program.model_proto
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    refuse_negative_codes(model.graph, constants, feature_names)
    return OnnxModel.of(model, constants)


def _numpy_dtype_of(tensor: Tensor, subject: str) -> np.dtype[Any]:
    """Return the tensor's dtype for numpy; raise SourceError for a dtype that no input of a bundle has."""
    numpy_type_by_dtype = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}
    if tensor.dtype not in numpy_type_by_dtype:
        raise SourceError(
            f"{subject} is {tensor.dtype}: inputs must be int32, int64 or float32; convert texts and flags to numbers "
            "first"
        )
    return np.dtype(numpy_type_by_dtype[tensor.dtype])


def _describe_export_failure(error: Exception) -> str:
    """Describe the cause of a failed export, with the unsupported operator if any, and the remedy."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    messages_text = "\n".join(map(str, causes))
    if operator_match := re.search(
        r"No (?:ONNX function|decompositions?) found for <?(?:OpOverload\(op=')?([\w.:]+)", messages_text
    ):
        return f"uses {operator_match[1]}, which ONNX does not have: write forward with other operators"
    return f"cannot be exported: {first_message_line(causes[-1])}; forward must not branch on values of its inputs"


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Silence torch's log and warnings, and disable fused attention, which has no ONNX form."""
    log, was_fastpath_enabled = (logging.getLogger("torch.onnx"), torch.backends.mha.get_fastpath_enabled())
    log_level = log.level
    log.setLevel(logging.ERROR)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings by torch about its own modules
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fastpath_enabled)
        log.setLevel(log_level)


def demand_exportable(module: Any, tower_name: str) -> None:
    """Raise SourceError or BundleError for a module whose export would be wrong or impossible; nothing is run."""
    if isinstance(module, torch.jit.ScriptModule):
        raise SourceError(
            f"{tower_name} is a scripted module, which torch.onnx does not take: give the original nn.Module"
        )
    if not isinstance(module, nn.Module):
        raise SourceError(
            f"{tower_name} is a {type(module).__name__}: give an nn.Module whose forward returns vectors [n, dims]"
        )
    tensor_by_name = dict(module.named_parameters()) | dict(module.named_buffers())
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensor_by_name.values())
    if weights_bytes > WEIGHTS_BYTES_MAX:
        raise BundleError(
            f"{tower_name} has {weights_bytes:,} bytes of weights, more than {WEIGHTS_BYTES_MAX:,}: use fewer "
            "dimensions",
            bytes=weights_bytes,
        )
    for name, tensor in tensor_by_name.items():
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise SourceError(f"{tower_name}: {name} is {tensor.dtype}: call .float() on it before the import")
        if tensor.device.type != "cpu":
            raise SourceError(f"{tower_name}: {name} is on {tensor.device}: call .cpu() on it before the import")
    if any(submodule.training for submodule in module.modules()):
        raise SourceError(
            f"{tower_name} is in training mode, in which dropout and batch norm change its output: call .eval() on it"
        )


def _select_one_row(array_by_input: ArraysByInput, row_index: int) -> ArraysByInput:
    return {name: array[row_index : row_index + 1] for name, array in array_by_input.items()}


def run_module(
    module: nn.Module, array_by_input: ArraysByInput, tower_name: str, entity_text: str = ""
) -> NDArray[np.float32]:
    """Return the output float32 [n, dims] of the module; raise SourceError for any other output.

    `entity_text` names the entity of an input of one row.
    """
    row_count = len(next(iter(array_by_input.values())))
    try:
        with torch.no_grad():
            output = module(*(torch.from_numpy(array) for array in array_by_input.values()))
    except Exception as error:  # the module may raise any exception
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in array_by_input.items())
        remedy = "pad, max_length and the number of items must be those of the training"
        if entity_text and array_by_input.keys() - _BINDING_BY_INPUT.keys():
            remedy = "give the codes and numbers of the training; its codes start at 0"
        raise SourceError(
            f"{tower_name} fails on {entity_text or shapes}: {first_message_line(error)}; {remedy}"
        ) from None
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or len(output) != row_count:
        shape_text = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise SourceError(
            f"{tower_name} returns {shape_text} for {row_count} rows, not [{row_count}, dims]: wrap it in a module "
            "whose forward returns one vector for each row"
        )
    vectors: NDArray[np.float32] = output.numpy()
    is_nonfinite = ~np.isfinite(vectors).all(axis=1)
    if is_nonfinite.any():
        raise SourceError(
            f"{tower_name} returns NaN or infinity, first "
            f"{f'for {entity_text}' if entity_text else f'in row {int(is_nonfinite.argmax())}'}: was the "
            "training finished, "
            "and does forward mask padding without a division by 0?"
        )
    return vectors


def demand_free_padding(
    module: nn.Module, make_arrays: MakeArrays, padded_lengths: tuple[int, int], tower_name: str
) -> None:
    """Raise SourceError if the vector of a history depends on the amount of padding after it."""
    short_length, long_length = padded_lengths
    item_count = max(1, short_length // 2)
    short_vectors, long_vectors = (
        run_module(module, make_arrays(17, item_count, padded_length), tower_name) for padded_length in padded_lengths
    )
    if (relative_error := _relative_error(long_vectors, short_vectors)) > PARITY_TOLERANCE:
        raise SourceError(
            f"{tower_name}: the vector of a history of {item_count} items changes by {relative_error:.1g} if it is "
            f"padded to {long_length} instead of {short_length}: mask the padding in forward, or set is_fixed=True in "
            "Example, which always pads to max_length"
        )


def demand_parity(
    model: OnnxModel,
    module: nn.Module,
    spec: TowerSpec,
    make_arrays: MakeArrays,
    traced_shape: tuple[int, int],
    padded_lengths: tuple[int, ...],
    tower_name: str,
) -> float:
    """Return the largest difference between ONNX Runtime and torch.

    Both run 1, 2 and 17 rows, with histories of 1 item (0 if there are features), half and all of each padded length.
    `traced_shape` is the number of rows and the length in the export. Raises BundleError for a dimension that the
    export has frozen, or a difference above the tolerance.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tower.onnx"
            model.write(path)
            session = ort.InferenceSession(str(path), _quiet_session_options(), providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise BundleError(
            f"{tower_name}: ONNX Runtime cannot open its model: {first_message_line(error)}; write forward with other "
            "operators"
        ) from None

    def measure_difference(row_count: int, item_count: int, padded_length: int) -> float:
        array_by_input = make_arrays(row_count, item_count, padded_length)
        torch_vectors = run_module(module, array_by_input, tower_name)
        try:
            onnx_vectors = session.run([spec.output], dict(array_by_input))[0]
        except Exception:  # raised for a shape that the model does not take
            return float("inf")
        return (
            _relative_error(onnx_vectors, torch_vectors) if onnx_vectors.shape == torch_vectors.shape else float("inf")
        )

    worst_difference, items_min = 0.0, 0 if spec.features else 1
    for padded_length in padded_lengths:
        for row_count in PARITY_ROWS:
            for item_count in sorted({items_min, (padded_length + 1) // 2, padded_length}):
                difference = measure_difference(row_count, item_count, padded_length)
                if not difference <= PARITY_TOLERANCE:
                    raise BundleError(
                        _parity_message(
                            measure_difference,
                            spec,
                            traced_shape,
                            (row_count, item_count, padded_length),
                            difference,
                            tower_name,
                        )
                    )
                worst_difference = max(worst_difference, difference)
    return worst_difference


def _parity_message(
    measure_difference: Callable[[int, int, int], float],
    spec: TowerSpec,
    traced_shape: tuple[int, int],
    failing_shape: tuple[int, int, int],
    difference: float,
    tower_name: str,
) -> str:
    """Return a message that names the frozen axis, if changing that axis alone is enough, else the difference."""
    traced_rows, traced_length = traced_shape
    if measure_difference(traced_rows, traced_length, traced_length) <= PARITY_TOLERANCE:
        remedy = "take sizes from tensors in forward (x.shape), not from Python numbers"
        if not measure_difference(PARITY_ROWS[-1], traced_length, traced_length) <= PARITY_TOLERANCE:
            return f"{tower_name}: input {spec.inputs[0].name!r} has axis 0 (rows) frozen at {traced_rows}: {remedy}"
        if (
            spec.history is not None
            and not measure_difference(traced_rows, failing_shape[2], failing_shape[2]) <= PARITY_TOLERANCE
        ):
            return (
                f"{tower_name}: input {spec.history.name!r} has axis 1 (length) frozen at {traced_length}: {remedy}, "
                "or set is_fixed=True in Example"
            )
    shape_text = f"{failing_shape[0]} rows" + (
        f" with {failing_shape[1]} of {failing_shape[2]} items" if spec.history else ""
    )
    return (
        f"{tower_name} differs from its ONNX model by {difference:.2g} on {shape_text} ({PARITY_TOLERANCE:g} is "
        "allowed): forward must not branch on Python numbers computed from its inputs"
    )


def first_message_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".: ")


def _relative_error(actual_vectors: NDArray[np.float32], expected_vectors: NDArray[np.float32]) -> float:
    row_scale = np.maximum(np.abs(expected_vectors).max(axis=1, keepdims=True), 1.0)
    return float((np.abs(actual_vectors - expected_vectors) / row_scale).max())


def _quiet_session_options() -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options
