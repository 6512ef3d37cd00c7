"""Specification of a tower: its inputs, the source of each, and its output; and the check of a model against it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from cache.errors import BundleError
from cache.format.ids import FeatureValue

InputBinding = Literal["history", "item_index", "feature"]
InputDtype = Literal["int32", "int64", "float32", "string"]

_ONNX_TYPES = {"int32": "int32", "int64": "int64", "float32": "float", "string": "string"}
_PADDED_LENGTH_MIN = 16


@dataclass(frozen=True, slots=True)
class InputSpec:
    """ONNX input: int [n, length] for a history, [n] for an index, [n] or [n, width] for a feature."""

    name: str
    bind: InputBinding
    dtype: InputDtype
    column: str | None = None
    width: int | None = None
    max_length: int | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        if self.bind == "history" and (not self.max_length or self.pad is None):
            raise BundleError(f"history input {self.name!r} needs max_length and pad", input=self.name)
        if self.bind != "feature" and self.dtype not in ("int32", "int64"):
            raise BundleError(
                f"{self.bind} input {self.name!r} must hold indices, int32 or int64, not {self.dtype}", input=self.name
            )
        if self.bind == "feature" and not self.column:
            raise BundleError(f"feature input {self.name!r} names no column", input=self.name)


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """Specification of a tower's inputs and output: the part of `bundle.json` that the manifest contains."""

    inputs: tuple[InputSpec, ...]
    output: str
    output_dims: int

    @property
    def history(self) -> InputSpec | None:
        """History input, if the tower has one."""
        return next((input_spec for input_spec in self.inputs if input_spec.bind == "history"), None)

    @property
    def features(self) -> tuple[InputSpec, ...]:
        """Inputs that are filled from feature columns."""
        return tuple(input_spec for input_spec in self.inputs if input_spec.bind == "feature")

    def blank_features(self) -> dict[str, FeatureValue]:
        """Blank value of each feature input, by input name: 0, an empty text, or a list of `width` such values."""
        value_by_input: dict[str, FeatureValue] = {}
        for input_spec in self.features:
            if input_spec.dtype == "string":
                value_by_input[input_spec.name] = "" if input_spec.width is None else ("",) * input_spec.width
            else:
                value_by_input[input_spec.name] = 0 if input_spec.width is None else (0,) * input_spec.width
        return value_by_input

    def to_json(self) -> dict[str, Any]:
        """Return the specification as a JSON object, as in `bundle.json` and the manifest."""
        return {
            "inputs": [asdict(input_spec) for input_spec in self.inputs],
            "output": self.output,
            "output_dims": self.output_dims,
        }

    @classmethod
    def from_json(cls, spec_document: Mapping[str, Any]) -> Self:
        """Parse the result of `to_json`; raise BundleError for anything else."""
        field_names = [field.name for field in fields(InputSpec)]
        try:
            for raw_input in spec_document["inputs"]:
                if unknown := sorted(raw_input.keys() - field_names):
                    raise BundleError(
                        f"input {raw_input.get('name')!r} has no field {unknown[0]!r}; there are "
                        f"{', '.join(field_names)} "
                        "(width is the length of a feature's lists)",
                        input=raw_input.get("name"),
                    )
            inputs = tuple(InputSpec(**raw_input) for raw_input in spec_document["inputs"])
            return cls(inputs, str(spec_document["output"]), int(spec_document["output_dims"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"not a tower specification: {error}") from error


def padded_lengths_up_to(max_length: int) -> tuple[int, ...]:
    """Return the padded lengths: powers of two from 16, ending with `max_length` itself."""
    padded_lengths = []
    padded_length = _PADDED_LENGTH_MIN
    while padded_length < max_length:
        padded_lengths.append(padded_length)
        padded_length *= 2
    return (*padded_lengths, max_length)


def check_padded_lengths(file_name: str, session: Any, spec: TowerSpec) -> tuple[int, ...]:
    """Return the padded lengths of histories for an ONNX session.

    Raises BundleError naming both sides if it does not fit.
    """
    onnx_input_by_name = {onnx_input.name: onnx_input for onnx_input in session.get_inputs()}
    spec_by_name = {input_spec.name: input_spec for input_spec in spec.inputs}
    if not spec_by_name or onnx_input_by_name.keys() != spec_by_name.keys():
        raise BundleError(
            f"{file_name} has the inputs {sorted(onnx_input_by_name)}, the specification binds {sorted(spec_by_name)}",
            onnx=sorted(onnx_input_by_name),
            specification=sorted(spec_by_name),
        )
    if sum(input_spec.bind == "history" for input_spec in spec.inputs) > 1:
        raise BundleError(f"{file_name}: a tower may have one history input at most")
    padded_lengths: tuple[int, ...] = ()
    for input_name, input_spec in spec_by_name.items():
        onnx_type, shape = (onnx_input_by_name[input_name].type, list(onnx_input_by_name[input_name].shape))
        if onnx_type != f"tensor({_ONNX_TYPES[input_spec.dtype]})":
            raise BundleError(
                f"{file_name}: input {input_name!r} is {onnx_type} in the model, {input_spec.dtype} in the "
                "specification",
                input=input_name,
            )
        inner_dims: list[int | None] = (
            [None] if input_spec.bind == "history" else [input_spec.width] if input_spec.width else []
        )
        if len(shape) != 1 + len(inner_dims) or isinstance(shape[0], int):
            raise BundleError(
                f"{file_name}: input {input_name!r} has shape {shape} in the model; the specification "
                f"({input_spec.bind}) needs [rows, any number of them{', ...' if inner_dims else ''}]",
                input=input_name,
            )
        if inner_dims and inner_dims[0] and isinstance(shape[1], int) and shape[1] != inner_dims[0]:
            raise BundleError(
                f"{file_name}: input {input_name!r} has width {shape[1]} in the model, {inner_dims[0]} in the "
                "specification",
                input=input_name,
            )
        if input_spec.bind == "history":
            fixed_length = shape[1] if isinstance(shape[1], int) else None
            if fixed_length is not None and fixed_length != input_spec.max_length:
                raise BundleError(
                    f"{file_name}: input {input_name!r} has length {fixed_length} in the model, max_length "
                    f"{input_spec.max_length} in the specification",
                    input=input_name,
                )
            padded_lengths = (
                (fixed_length,) if fixed_length is not None else padded_lengths_up_to(input_spec.max_length or 1)
            )
    _check_output(file_name, session, spec)
    return padded_lengths


def _check_output(file_name: str, session: Any, spec: TowerSpec) -> None:
    output_by_name = {onnx_output.name: onnx_output for onnx_output in session.get_outputs()}
    if spec.output not in output_by_name:
        raise BundleError(
            f"{file_name} has the outputs {sorted(output_by_name)}, the specification requires {spec.output!r}",
            onnx=sorted(output_by_name),
            specification=spec.output,
        )
    output = output_by_name[spec.output]
    shape = list(output.shape)
    dims = shape[1] if len(shape) == 2 and isinstance(shape[1], int) else spec.output_dims
    if output.type != "tensor(float)" or len(shape) != 2 or dims != spec.output_dims:
        raise BundleError(
            f"{file_name}: output {spec.output!r} is {output.type} {shape} in the model, the specification "
            f"says float32 [rows, {spec.output_dims}]",
            output=spec.output,
        )
