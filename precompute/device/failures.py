"""Classification of device failures by the messages of torch, cuBLAS, the driver and Triton."""

import torch


def is_full(error: Exception) -> bool:
    """True if there is no memory left, on the device or pinned: with less at once it may do."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error)
    has_full_message = "out of memory" in message or "CUBLAS_STATUS_ALLOC_FAILED" in message
    return has_full_message and isinstance(error, RuntimeError)


def is_of_device(error: Exception) -> bool:
    """True if the device failed and can be used no more; the launcher of kernels has only words for that."""
    return isinstance(error, torch.AcceleratorError) or "Triton Error [CUDA]" in str(error)
