"""Live path: towers in ONNX Runtime, candidates from FAISS, ranking, and checks of their inputs.

Start at `predictor`.
"""
