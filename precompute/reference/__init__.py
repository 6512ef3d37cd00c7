"""The reference model: a closed-form two-tower, its numbers chosen by what it finds of held-out histories.

Imports bundles and sources; no gradients and no torch. Start at `train`.
"""
