"""ONNX Runtime with its telemetry off: wheels since 1.29 report every session unless the environment forbids it."""

import os

# setdefault: who wants it says so in the environment.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

__all__ = ["ort"]
