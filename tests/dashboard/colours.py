"""Distances of colours, also for viewers with colour vision deficiencies."""

import numpy as np
from numpy.typing import NDArray

Rgb = NDArray[np.float64]

# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009),
# severity 1.0, on linear RGB.
VISIONS: dict[str, Rgb] = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip
_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) / np.array(
    [[0.9505], [1.0], [1.089]]
)


def linear(colour: str) -> Rgb:
    """Convert `#rrggbb` to linear RGB."""
    part = np.array([int(colour[offset : offset + 2], 16) / 255 for offset in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def distance(left_colour: str, right: str, vision: str) -> float:
    """Distance in CIELAB (D65) under this vision; 2 is just visible, 10 at a glance."""
    return float(np.linalg.norm(_lab(left_colour, vision) - _lab(right, vision)))


def contrast(left_colour: str, right: str) -> float:
    """WCAG's ratio of luminances."""
    dark, light = sorted(float(_TO_XYZ[1] @ linear(colour)) for colour in (left_colour, right))
    return (light + 0.05) / (dark + 0.05)


def _lab(colour: str, vision: str) -> Rgb:
    x, y, z = np.cbrt(np.clip(_TO_XYZ @ np.clip(VISIONS[vision] @ linear(colour), 0, 1), 1e-9, None))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
