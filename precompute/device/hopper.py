"""Kernels of the fused top-K for Hopper GPUs, in CUDA C++, compiled on first use.

`kernels/above.cu` and `keep.cu` are the counterparts of `above.py` and `keep.py`, `exact.cu` that of `keys.exact`, and
`encode.cu` is `DeviceItems.encode_queries` in one pass. Other GPUs, wider vectors, and hosts without NVRTC use the
Triton kernels or torch's operators. No further package is needed: PyTorch's builds for CUDA depend on NVRTC and
`cuda-bindings`.
"""

import ctypes
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import torch

from precompute.device.columns import BLOCK_GROUPS, SPLITS, BlockStage, Columns, Queries

PROGRAM_USERS = 256
"""Number of users of one program of `above`."""
TILE_ITEMS = 128
"""Number of items in one tile of a program of `above`."""
WIDTH_MAX = 256
"""Maximum width of a code: wider users do not fit into shared memory together with the items."""
_CHUNK_NUMBERS = 64
"""Numbers of a code in one copy: 128 bytes of a row, which the copy engine swizzles."""
_USER_CHUNK_BYTES, _STAGE_BYTES = (PROGRAM_USERS * _CHUNK_NUMBERS * 2, TILE_ITEMS * _CHUNK_NUMBERS * 2)
_STAGES_MAX = 8
_SHARED_BYTES = 224 << 10
"""Shared memory for users and the ring of item tiles; a program may have 227 KiB."""
_ALIGNMENT_BYTES = 1024
ROUND_UP, ROUND_UP_SUMMAND = 1 + 1e-5, 1e-12
"""Factor and summand by which lengths of vectors are rounded up."""
KEEP_ROOM, KEEP_MAX = 32, 256
"""Entries of a segment for `keep`, and maximum entries that it keeps for a user: more do not fit into registers."""
_WARP_USERS = 8
"""Number of users of one program of `encode` or `keep`."""
_ABOVE_THREADS, _EXACT_THREADS = 384, 128
_PARTS_BYTES = 32 << 10
"""Shared memory of a program of `exact` for parts of vectors, in addition to its user and its list of columns."""
_EXACT_SHARED_BYTES = 128 << 10
_HOPPER_CAPABILITY = (9, 0)
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_FLOAT16, _SWIZZLE_128, _PROMOTION_256 = 6, 3, 3
"""Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion."""

_log = logging.getLogger(__name__)
_disabled_devices: set[torch.device] = set()


@dataclass(frozen=True, slots=True, eq=False)
class HopperKernels:
    """Kernels for codes of one width, loaded into one device's context.

    Each method enqueues one kernel on the current stream, and raises RuntimeError with the driver's name of an error.
    """

    encode_kernel: Any
    above_kernel: Any
    exact_kernel: Any
    above_shared_bytes: int
    device: torch.device

    def encode_users(
        self, scored_users: torch.Tensor, compared_users: torch.Tensor, code_width: int
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of `Queries` without `cosine_lengths`, in order, for users float32 [n, dims].

        Users are given as scored and as compared.
        """
        user_count, dims = scored_users.shape
        empty_numbers = partial(torch.empty, user_count, device=scored_users.device, dtype=torch.float32)
        exact = torch.empty((user_count, -(-dims // 4), 4), device=scored_users.device)
        codes = torch.empty((user_count, code_width), device=scored_users.device, dtype=torch.float16)
        length, residual, scale = empty_numbers(), empty_numbers(), empty_numbers()
        user_lengths = empty_numbers(dtype=torch.float64)
        arguments = [
            *_pointers(scored_users, compared_users, exact, codes, length, residual, scale, user_lengths),
            *map(ctypes.c_int, (user_count, dims, code_width)),
        ]
        if not user_count:
            return exact, codes, length, residual, scale, user_lengths
        _launch(self.encode_kernel, (-(-user_count // _WARP_USERS), 1), _WARP_USERS * 32, 0, arguments)
        return exact, codes, length, residual, scale, user_lengths

    def write_entries(
        self,
        user_codes: torch.Tensor,
        reach: torch.Tensor,
        user_limits: torch.Tensor,
        columns: Columns,
        block_weights: torch.Tensor,
        stage: BlockStage,
        entries: torch.Tensor,
        entry_counts: torch.Tensor,
        slack: float,
    ) -> None:
        """Write the entries of one stage: see `kernels.above`."""
        user_count = len(user_codes)
        real_group_count = len(columns.longest_by_group) - len(columns.padding_columns) // columns.group_size
        stage_fields = (stage.block_count, stage.block_stride, stage.first_block, stage.skip, stage.hole)
        arguments = [
            _tensor_map(user_codes, PROGRAM_USERS),
            _tensor_map(columns.item_codes, TILE_ITEMS),
            *_pointers(reach, user_limits, block_weights, entries, entry_counts),
            *map(ctypes.c_int, (user_count, real_group_count, *stage_fields, entries.shape[2])),
            ctypes.c_float(slack),
        ]
        grid = -(-user_count // PROGRAM_USERS), SPLITS
        _launch(self.above_kernel, grid, _ABOVE_THREADS, self.above_shared_bytes, arguments)

    def keep(
        self,
        entries: torch.Tensor,
        entry_counts: torch.Tensor,
        required_counts: torch.Tensor,
        kept_entries: torch.Tensor,
        user_limits: torch.Tensor,
        left_out_bounds: torch.Tensor,
        halvings: int,
    ) -> None:
        """Merge the entries of a stage, in segments of `KEEP_ROOM`, into the kept ones: see `kernels.keep`."""
        user_count, capacity = kept_entries.shape[:2]
        arguments = [
            *_pointers(entries, entry_counts, required_counts, kept_entries, user_limits, left_out_bounds),
            ctypes.c_int(user_count),
        ]
        kernel = _load_keep_kernel(capacity, entries.shape[1], halvings, self.device)
        _launch(kernel, (-(-user_count // _WARP_USERS), 1), _WARP_USERS * 32, 0, arguments)

    def write_keys(
        self,
        item_vectors: torch.Tensor,
        item_lengths: torch.Tensor | None,
        columns: Columns,
        queries: Queries,
        hidden_rows: tuple[torch.Tensor, torch.Tensor],
        kept_entries: torch.Tensor,
        left_out_bounds: torch.Tensor,
        sort_keys: torch.Tensor,
    ) -> None:
        """Write the exact keys int64 [n, size, capacity] of kept entries: see `kernels.keys`.

        `item_vectors` and `item_lengths` are those of the items (`DeviceItems`). A user's keys are written without
        gaps, followed by `WORST`.
        """
        user_count, capacity = kept_entries.shape[:2]
        steps = item_vectors.shape[1]
        is_cosine = item_lengths is not None and queries.cosine_lengths is not None
        length_pair = (queries.cosine_lengths, item_lengths) if is_cosine else (queries.exact_vectors, item_vectors)
        arguments = [
            *_pointers(queries.exact_vectors, length_pair[0], item_vectors, length_pair[1]),
            *_pointers(kept_entries, left_out_bounds, columns.item_ordinals, *hidden_rows, sort_keys),
            *map(ctypes.c_int, (len(item_vectors), steps, capacity, is_cosine)),
        ]
        shared_bytes = _PARTS_BYTES + steps * 16 + columns.group_size * capacity * 4
        _launch(self.exact_kernel, (user_count, 1), _EXACT_THREADS, shared_bytes, arguments)


def kernels_for(code_width: int, device: torch.device) -> HopperKernels | None:
    """Return the kernels for codes of `code_width` numbers on a device; None if the Triton kernels must be used."""
    if device.type != "cuda" or code_width > WIDTH_MAX or device in _disabled_devices:
        return None
    if torch.cuda.get_device_capability(device) != _HOPPER_CAPABILITY:
        return None
    return _load_kernels(-(-code_width // _CHUNK_NUMBERS), device)


def disable(device: torch.device) -> bool:
    """Disable the kernels on a device from now on; return True if they were usable there before."""
    if device.type != "cuda":
        return False
    device = torch.empty(0, device=device).device  # a device name with its index
    could_be_used = device not in _disabled_devices and torch.cuda.get_device_capability(device) == _HOPPER_CAPABILITY
    _disabled_devices.add(device)
    return could_be_used


@functools.lru_cache
def _load_keep_kernel(capacity: int, segments: int, halvings: int, device: torch.device) -> Any:
    constants = {"CAPACITY": capacity, "SEGMENTS": segments, "ROOM": KEEP_ROOM, "HALVINGS": halvings}
    with torch.cuda.device(device):
        return _load_function("keep", compile_kernel("keep", constants), 0)


@functools.lru_cache
def _load_kernels(chunk_count: int, device: torch.device) -> HopperKernels | None:
    """Load the kernels into a device's context; None, with the reason in the log, if that fails."""
    ring_constants_of_width = ring_constants(chunk_count)
    shared_bytes = chunk_count * _USER_CHUNK_BYTES + ring_constants_of_width["STAGES"] * _STAGE_BYTES + _ALIGNMENT_BYTES
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # the current context of this thread is then that of the device
            encode_constants = {
                "NUMBERS": chunk_count * _CHUNK_NUMBERS // 32,
                "ROUND_UP": ROUND_UP,
                "LEAST": ROUND_UP_SUMMAND,
            }
            encode = _load_function("encode", compile_kernel("encode", encode_constants), 0)
            above_kernel_constants = ring_constants_of_width | {"SPLITS": SPLITS, "LANES": BLOCK_GROUPS}
            above = _load_function("above", compile_kernel("above", above_kernel_constants), shared_bytes)
            exact = _load_function("exact", compile_kernel("exact", {}), _EXACT_SHARED_BYTES)
    except (ImportError, OSError, RuntimeError) as error:
        _log.warning("%s is searched by Triton's kernels, which are slower: %s", device, error)
        return None
    return HopperKernels(encode, above, exact, shared_bytes, device)


def ring_constants(chunk_count: int) -> dict[str, int]:
    """Return constants of `above` for users of `chunk_count` chunks, with as many item stages as there is room for."""
    free_bytes = _SHARED_BYTES - chunk_count * _USER_CHUNK_BYTES
    return {"CHUNKS": chunk_count, "STAGES": min(_STAGES_MAX, free_bytes // _STAGE_BYTES)}


def compile_kernel(kernel_name: str, value_by_constant: Mapping[str, float]) -> bytes:
    """Compile `kernels/<name>.cu` for sm_90a by NVRTC. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    source = files("precompute.device.kernels").joinpath(f"{kernel_name}.cu").read_bytes()
    program = _check_result(*nvrtc.nvrtcCreateProgram(source, f"{kernel_name}.cu".encode(), 0, [], []))
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--fmad=false"]
    options += [f"--define-macro={constant}={value}" for constant, value in value_by_constant.items()]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(result):
        log = bytearray(_check_result(*nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC: {log.decode(errors='replace').strip()}")
    cubin: bytes = b" " * _check_result(*nvrtc.nvrtcGetCUBINSize(program))
    _check_result(*nvrtc.nvrtcGetCUBIN(program, cubin))
    _check_result(*nvrtc.nvrtcDestroyProgram(program))
    return cubin


def _load_function(kernel_name: str, cubin: bytes, shared_bytes: int) -> Any:
    from cuda.bindings import driver

    module = _check_result(*driver.cuModuleLoadData(cubin))
    function = _check_result(*driver.cuModuleGetFunction(module, kernel_name.encode()))
    shared_size_attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check_result(*driver.cuFuncSetAttribute(function, shared_size_attribute, shared_bytes))
    return function


def _launch(
    kernel_function: Any,
    grid_size: tuple[int, int],
    thread_count: int,
    shared_bytes: int,
    kernel_arguments: Sequence[Any],
) -> None:
    from cuda.bindings import driver

    addresses = (ctypes.c_void_p * len(kernel_arguments))(*map(ctypes.addressof, kernel_arguments))
    stream = torch.cuda.current_stream().cuda_stream
    _check_result(
        *driver.cuLaunchKernel(
            kernel_function, *grid_size, 1, thread_count, 1, 1, shared_bytes, stream, ctypes.addressof(addresses), 0
        )
    )


def _pointers(*tensors: torch.Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def _tensor_map(matrix: torch.Tensor, copied_rows: int) -> Any:
    """Return a half-precision matrix's descriptor for copies of `copied_rows` rows by one chunk, zero beyond its edges.

    It is made by ctypes: the driver requires 64-byte alignment, which `cuda-bindings` does not guarantee.
    """
    storage = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    offset = -ctypes.addressof(storage) % _MAP_ALIGNMENT
    descriptor = (ctypes.c_char * _MAP_BYTES).from_buffer(storage, offset)
    row_count, width = matrix.shape
    result = _driver().cuTensorMapEncodeTiled(
        descriptor, _FLOAT16, 2, ctypes.c_void_p(matrix.data_ptr()), (ctypes.c_uint64 * 2)(width, row_count),
        (ctypes.c_uint64 * 1)(matrix.stride(0) * 2), (ctypes.c_uint32 * 2)(_CHUNK_NUMBERS, copied_rows),
        (ctypes.c_uint32 * 2)(1, 1), 0, _SWIZZLE_128, _PROMOTION_256, 0,
    )  # fmt: skip
    if result:
        raise RuntimeError(f"cuTensorMapEncodeTiled: CUresult {result}")
    return descriptor


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check_result(result: Any, *values: Any) -> Any:
    """Return the only value of a call of `cuda-bindings`. Raises RuntimeError if it failed."""
    if int(result):
        raise RuntimeError(result.name)
    return values[0] if values else None
