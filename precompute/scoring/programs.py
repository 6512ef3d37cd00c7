"""Programs that decide the bits of results: libraries, the kernel, the processor's instructions, a device."""

import functools
import platform
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cache.formats import THIS_RELEASE
from cache.topk.compiled import find_kernel

_LIBRARIES = ("numpy", "onnxruntime", "onnxruntime-gpu", "faiss-cpu", "pyarrow")

_DEVICE_LIBRARIES = ("torch", "triton")

_INSTRUCTION_LINES = ("flags", "Features")
"""Names of the line with the instructions in /proc/cpuinfo, by architecture."""


def computed_by(device: str | None = None) -> str:
    """Return the kernel's class, the processor's instructions, a torch device's class, and versions of libraries.

    Results of two nights may be combined only if these texts are equal.
    """
    library_names = (*_LIBRARIES, *(_DEVICE_LIBRARIES if device else ()))
    versions = [
        f"{library_name} {library_version}"
        for library_name in library_names
        if (library_version := _version(library_name))
    ]
    engine = find_kernel()
    kernel_text = "faiss" if engine is None else f"kernel {engine.level}"
    processor_text = f"processor {instructions_digest()}"
    return ", ".join([kernel_text, processor_text, *_device_names(device), f"larder {THIS_RELEASE}", *versions])


@functools.cache
def instructions_digest() -> str:
    """Return a digest of the instructions of this processor, by which libraries choose their code."""
    processor_name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags_line = next((line for line in lines if line.partition(":")[0].strip() in _INSTRUCTION_LINES), processor_name)
    return blake2b(" ".join(sorted(flags_line.split())).encode(), digest_size=4).hexdigest()


def _device_names(device: str | None) -> list[str]:
    if device is None:
        return []
    import torch

    if not device.startswith("cuda"):
        return [device]
    return [str(torch.cuda.get_device_name(device)), f"CUDA {torch.version.cuda}"]


@functools.cache
def _version(library_name: str) -> str | None:
    try:
        return version(library_name)
    except PackageNotFoundError:
        return None
