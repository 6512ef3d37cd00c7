"""Reference model: two linear towers, whose shape is chosen by recall of held-out histories.

Spectral, or by alternating least squares; no gradients and no torch. Start at `train`.
"""
