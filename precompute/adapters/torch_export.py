"""A torch module as an ONNX model whose inputs are bound by name, compared with the module before it is given out."""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cache.errors import BundleError, SourceError
from cache.model.tower import Histories
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.adapters.traps import (
    Feed,
    demand_exportable,
    demand_free_padding,
    demand_parity,
    first_line,
    vectors_of,
)
from precompute.bundles.onnx_model import OnnxModel

OPSET = 18
"""Opset that torch writes without converting."""
ROWS_AT_ONCE = 4096
_SHORT = 16
_INDICES = {"history": "history", "item": "item_index", "user": "user_index"}


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
        self, rows: int, features: Mapping[str, Any], histories: Histories | None = None
    ) -> NDArray[np.float32]:
        """Vectors of rows 0 to `rows`, by torch; `features` have a row for each."""
        vector_batches = []
        for start in range(0, rows, ROWS_AT_ONCE):
            batch_rows = np.arange(start, min(start + ROWS_AT_ONCE, rows))
            feed = {}
            for name, value in self.inputs.items():
                if name == "history":
                    assert histories is not None  # noqa: S101
                    dtype = str(_numpy_of(value, name))
                    feed[name] = histories.padded(
                        batch_rows, self.example.max_length, self.pad, dtype
                    )
                elif name in _INDICES:
                    feed[name] = batch_rows.astype(_numpy_of(value, name))
                else:
                    feed[name] = np.ascontiguousarray(features[name][batch_rows])
            vector_batches.append(vectors_of(self, feed, self.tower_name))
        return np.concatenate(vector_batches)

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
    model = _without_traces(program)
    return (
        model,
        spec,
        demand_parity(model, tower, spec, tower.feed, traced, lengths, tower.tower_name),
    )


def _without_traces(program: Any) -> OnnxModel:
    """The model of an export, without its stack traces, which name folders of the machine."""
    initializers = program.model.graph.initializers
    constants = {name: initializers.pop(name).const_value.numpy() for name in list(initializers)}
    model = program.model_proto
    for node in model.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    return OnnxModel.of(model, constants)


def _numpy_of(value: Tensor, subject: str) -> np.dtype[Any]:
    """Its dtype; SourceError for one that no input of a bundle has."""
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
