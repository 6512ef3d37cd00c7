"""The reference model: two linear towers, chosen with their numbers by what they find of held-out histories.

Spectral, or by alternating least squares; no gradients and no torch. Start at `train`.
"""
