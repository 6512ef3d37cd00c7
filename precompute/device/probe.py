"""The kernels of the top-K where they can be relied on."""

import logging
from types import ModuleType

import torch

_log = logging.getLogger(__name__)


def kernels_for(dims: int, device: torch.device, use_kernels: bool | None) -> ModuleType | None:
    """`precompute.device.fused` if it works on this device; else None, and why in the log.

    `use_kernels` None is on GPUs only: elsewhere Triton has nothing but its interpreter. Raises torch.OutOfMemoryError
    and torch.AcceleratorError.
    """
    if not (device.type == "cuda" if use_kernels is None else use_kernels):
        return None
    try:
        from precompute.device import fused, hopper

        if dims > fused.WIDTH_MOST:
            reason = (
                f"the kernels take vectors of up to {fused.WIDTH_MOST} numbers, these have {dims}"
            )
        else:
            with torch.cuda.device(
                device if device.type == "cuda" else -1
            ):  # Triton's is the current one
                if fused.agrees(dims, device):
                    return fused
                if hopper.disable(device) and fused.agrees(dims, device):
                    _log.warning(
                        "%s: the CUDA kernels' lists differ from the operators': Triton's are used",
                        device,
                    )
                    return fused
            reason = "its kernels' lists differ from the operators'"
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a compiler, a driver, a missing package: each has its own
        reason = f"its kernels cannot be run ({type(error).__name__}: {error})"
    _log.warning("%s scores by torch's operators, several times slower: %s", device, reason)
    return None
