"""A `torch.export` program of a bundle, on a torch device.

torch's own loader unpickles sample inputs, looks up functions by any name and evaluates expressions. So a file is
rewritten in memory first: unneeded parts are left out, and unknown ones are refused.
"""

import io
import logging
import re
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from cache.errors import BundleError
from precompute.device.failures import is_full

_MEMBER_PATTERN = re.compile(
    r"data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|models/model\.json"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
)
_TENSOR_PATTERN = re.compile(r"(weight|tensor)_\d+")
_TARGET_PATTERN = re.compile(
    r"torch\.ops\.aten\.(?!from_file\b)\w+\.\w+"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pow|getitem|eq|ne|lt|le|gt|ge|and_|or_)"
    r"|torch\.sym_(int|float|max|min|not|ite|sqrt)"
)
_EXPRESSION_PATTERN = re.compile(
    r"(Symbol\('[su]\d+'|Integer|Rational|Add|Mul|Pow|Mod|Max|Min|FloorDiv|CleanDiv|CeilDiv|PythonMod"
    r"|Eq|Ne|Lt|Le|Gt|Ge|GreaterThan|LessThan|StrictGreaterThan|StrictLessThan"
    r"|positive|nonnegative|nonzero|integer|True|False|[su]\d+|-?\d+|[(),= ]|\*{1,2}|\+|-|//)*"
)
_CONTAINER_TYPES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}
_FORBIDDEN_FIELDS = ("as_operator", "as_custom_obj", "custom_obj")

STREAM_COUNT = 2
"""Number of callers whose batches a GPU takes at once: while one batch is copied, another is computed."""

_TORCH_LOCK = threading.Lock()
"""Lock for torch's loader and its compiler, which keep their state in global variables."""

_log = logging.getLogger(__name__)


class Program:
    """Exported model on its device: thread-safe; on a GPU it is compiled at the first batch."""

    def __init__(self, run_program: Callable[..., Any], input_order: Sequence[int], device: torch.device) -> None:
        self._run_uncompiled = self._run = run_program
        self._input_order = input_order
        self._device = device
        self._is_warm = device.type != "cuda"
        self._streams: SimpleQueue[torch.cuda.Stream | None] = SimpleQueue()
        for _ in range(STREAM_COUNT):
            self._streams.put(None if device.type != "cuda" else torch.cuda.Stream(device))

    @classmethod
    def open(cls, path: Path, input_names: Sequence[str], device: str) -> Self:
        """Load a file whose checksum was verified; `input_names` are the inputs of the specification.

        Raises BundleError for a file that is not a program, holds more than a tower needs, or has other inputs.
        """
        torch_device = torch.device(device)
        # TF32 keeps ten of float32's 23 bits: neither products nor convolutions would agree with the ONNX file.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        try:
            archive = io.BytesIO(_rewrite_archive(path))
            with _TORCH_LOCK:
                program = torch.export.load(archive)
        except BundleError:
            raise
        except Exception as error:  # torch's errors share no base class
            raise BundleError(f"{path.name} is not a program that torch can open: {error}") from error
        program_inputs = list(program.graph_signature.user_inputs)
        if sorted(program_inputs) != sorted(input_names):
            raise BundleError(
                f"{path.name} has the inputs {sorted(program_inputs)}, but the specification has {sorted(input_names)}",
                program=sorted(program_inputs),
                specification=sorted(input_names),
            )
        if torch_device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return cls(program.module(), [input_names.index(input_name) for input_name in program_inputs], torch_device)

    def outputs(self, inputs_of_batches: Iterable[Sequence[NDArray[Any]]]) -> Iterator[NDArray[np.float32]]:
        """Yield the output float32 [n, dims] of each batch, whose inputs are in the order of `input_names`.

        The next batch is prepared and sent while one is computed. Raises MemoryError if memory is exhausted.
        """
        stream = self._streams.get()
        wait_for_output: Callable[[], NDArray[np.float32]] | None = None
        try:
            for feed in inputs_of_batches:
                wait_for_next_output = self._start_batch(feed, stream)
                if wait_for_output is not None:
                    yield wait_for_output()
                wait_for_output = wait_for_next_output
            if wait_for_output is not None:
                yield wait_for_output()
        except RuntimeError as error:
            if not is_full(error):
                raise
            raise MemoryError(str(error)) from error
        finally:
            self._streams.put(stream)

    def _start_batch(
        self, batch_inputs: Sequence[NDArray[Any]], stream: torch.cuda.Stream | None
    ) -> Callable[[], NDArray[np.float32]]:
        """Start a batch; return a function that waits for its outputs."""
        if stream is None:
            with torch.inference_mode():
                tensors = [
                    torch.from_numpy(batch_inputs[input_index]).to(self._device) for input_index in self._input_order
                ]
                output = self._output(tensors).to(torch.float32).cpu()
            return lambda: np.asarray(output.numpy(), np.float32)
        with torch.inference_mode(), torch.cuda.stream(stream):
            pinned_inputs = [
                torch.from_numpy(batch_inputs[input_index]).pin_memory() for input_index in self._input_order
            ]
            device_output = self._output([tensor.to(self._device, non_blocking=True) for tensor in pinned_inputs])
            host_output = torch.empty(device_output.shape, dtype=torch.float32, pin_memory=True)
            host_output.copy_(device_output, non_blocking=True)
            copied_event = torch.cuda.Event()
            copied_event.record(stream)

        def settled() -> NDArray[np.float32]:
            copied_event.synchronize()
            host_array: NDArray[np.float32] = host_output.numpy()
            return host_array

        return settled

    def _output(self, input_tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with nullcontext() if self._is_warm else _TORCH_LOCK:
            if not self._is_warm:
                self._warm(input_tensors)
        try:
            output = self._run(*input_tensors)
        except Exception as error:  # the compiler may fail for a new shape
            if self._run is self._run_uncompiled or is_full(error):
                raise
            _log.warning("the program runs uncompiled from now on: %s", error)
            self._run = self._run_uncompiled
            output = self._run(*input_tensors)
        while isinstance(output, list | tuple) and len(output) == 1:
            output = output[0]
        output_tensor: torch.Tensor = output
        return output_tensor

    def _warm(self, input_tensors: Sequence[torch.Tensor]) -> None:
        """Compile the program for any number of rows; if that fails, it runs uncompiled."""
        try:
            compiled_run = torch.compile(self._run_uncompiled, dynamic=True)
            compiled_run(*input_tensors)
        except Exception as error:  # the compiler's errors share no base class
            if is_full(error):
                raise
            _log.warning("the program is not compiled: %s", error)
        else:
            self._run = compiled_run
        self._is_warm = True


def _rewrite_archive(path: Path) -> bytes:
    """Return the archive without sample inputs, metadata and guards; raise BundleError for other unknown content."""
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(buffer, "w") as safe_archive:
            for member in archive.infolist():
                member_name = member.filename.partition("/")[2]
                if not _MEMBER_PATTERN.fullmatch(member_name) or member.compress_type != zipfile.ZIP_STORED:
                    raise BundleError(
                        f"{path.name} holds {member.filename!r}, which an exported tower does not need: save it with "
                        "torch.export.save, weights and tensors only"
                    )
                member_bytes = archive.read(member)
                if member_name == "models/model.json":
                    member_bytes = orjson.dumps(_safe_graph(path.name, orjson.loads(member_bytes)))
                elif member_name.endswith("config.json"):
                    _check_tensors(path.name, orjson.loads(member_bytes))
                elif member_name.endswith("sample_inputs/model.pt"):
                    member_bytes = b""
                safe_archive.writestr(member.filename, member_bytes)
    except (zipfile.BadZipFile, orjson.JSONDecodeError, OSError) as error:
        raise BundleError(f"{path.name} is not an exported program: {error}") from error
    return buffer.getvalue()


def _safe_graph(file_name: str, graph: Any) -> Any:
    for json_object in _walk_json_objects(graph):
        if "metadata" in json_object:
            json_object["metadata"] = {}
        target, expression = json_object.get("target"), json_object.get("expr_str")
        if "inputs" in json_object and isinstance(target, str) and not _TARGET_PATTERN.fullmatch(target):
            raise BundleError(f"{file_name} calls {target!r}: only torch's own operators are allowed")
        if isinstance(expression, str) and not _EXPRESSION_PATTERN.fullmatch(expression):
            raise BundleError(f"{file_name} holds the expression {expression[:80]!r}, which is not a shape")
        for spec in (json_object.get("in_spec"), json_object.get("out_spec")):
            if isinstance(spec, str):
                _check_containers(file_name, orjson.loads(spec))
        if forbidden_fields := [field_name for field_name in _FORBIDDEN_FIELDS if json_object.get(field_name)]:
            raise BundleError(
                f"{file_name} holds {forbidden_fields[0]}: only tensors and torch's own operators are allowed"
            )
    if isinstance(graph, dict):
        graph["guards_code"] = []
    return graph


def _check_containers(file_name: str, spec: Any) -> None:
    for json_object in _walk_json_objects(spec):
        if json_object.get("type") not in _CONTAINER_TYPES:
            raise BundleError(f"{file_name} takes or returns a {json_object['type']}: a tower takes tensors")


def _check_tensors(file_name: str, config: Any) -> None:
    for json_object in _walk_json_objects(config):
        if json_object.get("use_pickle") or not _TENSOR_PATTERN.fullmatch(
            str(json_object.get("path_name", "weight_0"))
        ):
            raise BundleError(
                f"{file_name} holds {json_object.get('path_name')!r} pickled: only plain tensors are allowed"
            )


def _walk_json_objects(root_value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON value, nested ones included."""
    unvisited = [root_value]
    while unvisited:
        json_value = unvisited.pop()
        if isinstance(json_value, dict):
            yield json_value
            unvisited.extend(json_value.values())
        elif isinstance(json_value, list):
            unvisited.extend(json_value)
