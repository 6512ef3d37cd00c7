"""The live path: towers in ONNX Runtime, candidates from FAISS, ranking, and the checks of their inputs.

Start at `predictor`.
"""
