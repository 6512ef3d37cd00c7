"""Reproducibility of results: programs that their bits depend on, and rows computed in other company."""

import functools
import platform
from collections.abc import Callable
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache.formats import RELEASE
from cache.model.tower import Inputs, rows_of, rows_taken
from cache.topk.compiled import kernel

_LIBRARIES = ("numpy", "onnxruntime", "onnxruntime-gpu", "faiss-cpu", "pyarrow")

_DEVICE_LIBRARIES = ("torch", "triton")

_INSTRUCTION_LINES = ("flags", "Features")
"""Names of the line of instructions in /proc/cpuinfo, by architecture."""

REGROUPED_ROWS = 512
"""Rows of a sample that are computed once more in other company."""

_GROUP_SIZES = (1, 2, 3, 7, 33, 130)

_REGROUPING_SEED = 0


def computed_by(device: str | None = None) -> str:
    """Return the kernel's class, the processor's instructions, a torch device's class, and versions of libraries.

    Results of two nights may be combined if these are equal.
    """
    names = (*_LIBRARIES, *(_DEVICE_LIBRARIES if device else ()))
    versions = [
        f"{name} {library_version}" for name in names if (library_version := _version(name))
    ]
    engine = kernel()
    level = "faiss" if engine is None else f"kernel {engine.level}"
    processor = f"processor {instructions_digest()}"
    return ", ".join([level, processor, *_device_names(device), f"larder {RELEASE}", *versions])


@functools.cache
def instructions_digest() -> str:
    """Digest of the instructions that this processor has: libraries choose their code by them."""
    processor_name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags_line = next(
        (line for line in lines if line.partition(":")[0].strip() in _INSTRUCTION_LINES),
        processor_name,
    )
    return blake2b(" ".join(sorted(flags_line.split())).encode(), digest_size=4).hexdigest()


def _device_names(device: str | None) -> list[str]:
    if device is None:
        return []
    import torch

    if not device.startswith("cuda"):
        return [device]
    return [str(torch.cuda.get_device_name(device)), f"CUDA {torch.version.cuda}"]


@functools.cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_regrouped_alike(run: Callable[[Inputs], NDArray[np.float32]], inputs: Inputs) -> bool:
    """True if the first rows have the same bits together, in another order, and in groups of several sizes.

    A model's rows must not depend on the other rows of their batch, or its records are not copied.
    """
    count = min(REGROUPED_ROWS, rows_of(inputs))
    batch_outputs = run(rows_taken(inputs, np.arange(count)))
    order = np.random.default_rng(_REGROUPING_SEED).permutation(count)
    shuffled, start = [], 0
    for size in (*_GROUP_SIZES, count):
        rows = order[start : start + size]
        if len(rows):
            shuffled.append(run(rows_taken(inputs, rows)))
        start += size
    regrouped_outputs = np.concatenate(
        [np.empty((0, *batch_outputs.shape[1:]), np.float32), *shuffled]
    )
    return regrouped_outputs.tobytes() == batch_outputs[order].tobytes()
