"""Reference model: two linear towers, whose shape is chosen by recall of held-out histories.

Trained by a spectral method or alternating least squares, without gradients or torch. Start at `train`.
"""
