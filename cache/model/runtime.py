"""ONNX Runtime: disables its telemetry and selects the provider that runs a model, on the processor or a GPU."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

# Wheels since 1.29 report every session. setdefault: the environment can enable it.
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
    """GPU on which ONNX Runtime should run models: `provider` is cuda or tensorrt.

    `memory_max_bytes` 0: all of its memory.
    """

    provider: str
    device_number: int = 0
    memory_max_bytes: int = 0

    def missing_reason(self) -> str | None:
        """Return why this ONNX Runtime cannot use the GPU, as far as known before a model is opened; None if it can."""
        if _ONNX_PROVIDER_BY_NAME[self.provider] in ort.get_available_providers():
            return None
        return (
            f"ONNX Runtime {ort.__version__} here has no {_ONNX_PROVIDER_BY_NAME[self.provider]}: install "
            "onnxruntime-gpu in the "
            "place of onnxruntime"
        )

    def fallback_reason(self, used_providers: Iterable[str]) -> str | None:
        """Return why models do not run on the GPU although ONNX Runtime has the provider; None if all of them do."""
        other_providers = sorted({provider for provider in used_providers if provider != self.provider})
        if not other_providers:
            return None
        return (
            f"ONNX Runtime could not load {_ONNX_PROVIDER_BY_NAME[self.provider]} for device {self.device_number} "
            "and took "
            f"{', '.join(other_providers)}: check the driver, CUDA, cuDNN and TensorRT that this release needs"
        )

    def session_providers(self) -> list[Any]:
        """Return providers for a session, in the order of trial.

        TF32 is off, as its rounding would fail the agreement gates.
        """
        provider_options: dict[str, Any] = {"device_id": self.device_number, "use_tf32": 0}
        if self.memory_max_bytes:
            provider_options["gpu_mem_limit"] = self.memory_max_bytes
        providers: list[Any] = [(_ONNX_PROVIDER_BY_NAME["cuda"], provider_options), _ONNX_PROVIDER_BY_NAME[CPU]]
        if self.provider == "tensorrt":
            providers.insert(0, (_ONNX_PROVIDER_BY_NAME["tensorrt"], {"device_id": self.device_number}))
        return providers


def first_provider_of(session: ort.InferenceSession) -> str:
    """Return the provider that the session tries first: cpu if the GPU's provider could not be loaded."""
    onnx_name = session.get_providers()[0]
    return next((name for name, onnx_provider in _ONNX_PROVIDER_BY_NAME.items() if onnx_provider == onnx_name), CPU)
