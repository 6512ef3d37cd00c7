"""ONNX Runtime: its telemetry off, and the provider that runs a model: the processor's, or that of a GPU."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

# setdefault: wheels since 1.29 report every session; who wants it says so in the environment.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

__all__ = ["CPU", "Accelerator", "first_provider_of", "ort"]

CPU: Final = "cpu"
_ONNX_PROVIDER_BY_NAME: Final = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    CPU: "CPUExecutionProvider",
}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """GPU that ONNX Runtime is asked to run models on: `provider` is cuda or tensorrt; 0 bytes is all its memory."""

    provider: str
    device_number: int = 0
    memory_max_bytes: int = 0

    def missing_reason(self) -> str | None:
        """Reason why this ONNX Runtime cannot use it, as far as that is known before a model is opened."""
        if _ONNX_PROVIDER_BY_NAME[self.provider] in ort.get_available_providers():
            return None
        return (
            f"ONNX Runtime {ort.__version__} here has no {_ONNX_PROVIDER_BY_NAME[self.provider]}: install "
            "onnxruntime-gpu in the "
            "place of onnxruntime"
        )

    def fallback_reason(self, used_providers: Iterable[str]) -> str | None:
        """Reason why models run elsewhere though ONNX Runtime has the provider; None where all `used_providers` it."""
        other_providers = sorted({provider for provider in used_providers if provider != self.provider})
        if not other_providers:
            return None
        return (
            f"ONNX Runtime could not load {_ONNX_PROVIDER_BY_NAME[self.provider]} for device {self.device_number} "
            "and took "
            f"{', '.join(other_providers)}: check the driver, CUDA, cuDNN and TensorRT that this release wants"
        )

    def providers(self) -> list[Any]:
        """Providers as a session takes them, in the order in which it tries them; TF32 would cost the agreement."""
        provider_options: dict[str, Any] = {"device_id": self.device_number, "use_tf32": 0}
        if self.memory_max_bytes:
            provider_options["gpu_mem_limit"] = self.memory_max_bytes
        providers: list[Any] = [(_ONNX_PROVIDER_BY_NAME["cuda"], provider_options), _ONNX_PROVIDER_BY_NAME[CPU]]
        if self.provider == "tensorrt":
            providers.insert(0, (_ONNX_PROVIDER_BY_NAME["tensorrt"], {"device_id": self.device_number}))
        return providers


def first_provider_of(session: ort.InferenceSession) -> str:
    """Return the provider that a session tries first: cpu where the GPU's provider could not be loaded."""
    onnx_name = session.get_providers()[0]
    return next((name for name, onnx_provider in _ONNX_PROVIDER_BY_NAME.items() if onnx_provider == onnx_name), CPU)
