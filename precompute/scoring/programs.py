"""Programs on which the bits of results depend: libraries, the kernel, the processor's instructions, a device."""

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
"""Names of the line of instructions in /proc/cpuinfo, by architecture."""


def computed_by(device: str | None = None) -> str:
    """Return the kernel's class, the processor's instructions, a torch device's class, and versions of libraries.

    Results of two nights may be combined if these are equal.
    """
    names = (*_LIBRARIES, *(_DEVICE_LIBRARIES if device else ()))
    versions = [
        f"{name} {library_version}" for name in names if (library_version := _version(name))
    ]
    engine = find_kernel()
    level = "faiss" if engine is None else f"kernel {engine.level}"
    processor = f"processor {instructions_digest()}"
    return ", ".join(
        [level, processor, *_device_names(device), f"larder {THIS_RELEASE}", *versions]
    )


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
