"""The reference model: two towers linear in a history, chosen with their numbers by what they find of held-out histories.

Spectral or by alternating least squares; no gradients and no torch. Imports bundles and sources. Start at `train`.
"""
