"""Specification of a tower: its inputs, each bound by name to what fills it, and its output."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from cache.errors import BundleError

Bind = Literal["history", "item_index", "feature"]
Dtype = Literal["int32", "int64", "float32", "string"]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """ONNX input's specification: int [n, length] for a history, [n] for an index, [n] or [n, width] for a feature."""

    name: str
    bind: Bind
    dtype: Dtype
    column: str | None = None
    width: int | None = None
    max_length: int | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        if self.bind == "history" and (not self.max_length or self.pad is None):
            raise BundleError(
                f"history input {self.name!r} needs max_length and pad", input=self.name
            )
        if self.bind != "feature" and self.dtype not in ("int32", "int64"):
            raise BundleError(
                f"{self.bind} input {self.name!r} holds indices: int32 or int64, not {self.dtype}",
                input=self.name,
            )
        if self.bind == "feature" and not self.column:
            raise BundleError(f"feature input {self.name!r} names no column", input=self.name)


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """Specification of a tower's inputs and output: the part of `bundle.json` that is copied into the manifest."""

    inputs: tuple[InputSpec, ...]
    output: str
    output_dims: int

    @property
    def history(self) -> InputSpec | None:
        """The history input, if the tower has one."""
        return next((each for each in self.inputs if each.bind == "history"), None)

    @property
    def features(self) -> tuple[InputSpec, ...]:
        """Inputs that are filled from the caller's feature columns."""
        return tuple(each for each in self.inputs if each.bind == "feature")

    def to_json(self) -> dict[str, Any]:
        """JSON object of the specification, as in `bundle.json` and the manifest."""
        return {
            "inputs": [asdict(each) for each in self.inputs],
            "output": self.output,
            "output_dims": self.output_dims,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads `to_json`; raises BundleError for anything else."""
        try:
            inputs = tuple(InputSpec(**each) for each in data["inputs"])
            return cls(inputs, str(data["output"]), int(data["output_dims"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"not a tower specification: {error}") from error
