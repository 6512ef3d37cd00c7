"""Classification of device failures by the messages of torch, cuBLAS, the driver and Triton."""

import torch


def is_full(error: Exception) -> bool:
    """True if memory is exhausted, on the device or pinned: a smaller piece of work may succeed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error)
    has_full_message = "out of memory" in message or "CUBLAS_STATUS_ALLOC_FAILED" in message
    return has_full_message and isinstance(error, RuntimeError)


def is_of_device(error: Exception) -> bool:
    """True if the device failed and cannot be used any more; the launcher of kernels reports that only in messages."""
    return isinstance(error, torch.AcceleratorError) or "Triton Error [CUDA]" in str(error)
