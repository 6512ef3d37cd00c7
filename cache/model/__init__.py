"""The live path: towers in ONNX Runtime, candidates from FAISS, ranking, and the checks of their inputs.

Imports cache.format and cache.store. Start at `predictor`.
"""
