"""Quantization: numbers rounded to a record's precision and read back; what does not fit is refused. Pure."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.errors import UnfitValue
from cache.format.records.layout import Layout, Precision

SAFE_EXPONENT: Final = 111
"""Greatest exponent at which any float16 times its record's power of two stays within float32."""
STEP: Final[dict[Precision, float]] = {"f2": 2.0**-10, "f4": 2.0**-22, "i1": 1 / 127}
"""Spacing of stored numbers, as a share of the largest of their record."""
_TOP_EXPONENT: Final = 15
"""float16 holds up to 65504 < 2**16, so a record's largest number lies in [2**14, 2**15)."""
_POWER_MAX: Final = 127
"""Greatest power of two (exponent) in float32."""
_STEPS: Final = np.float32(127)
"""Steps of int8 from zero to the largest of a record."""


def quantize(layout: Layout, records: NDArray[Any], numbers: NDArray[np.float32]) -> None:
    """Writes numbers float32[n, width] into records[n]; raises UnfitValue for what the precision does not hold.

    Of a vector some numbers may become zero, as long as one does not: that is rounding, far under the precision of
    the others.
    """
    _check_finite(numbers)
    if layout.precision == "f4":
        records["numbers"] = numbers
    elif layout.precision == "f2":
        _put_halves(layout, records, numbers)
    else:
        scale = np.abs(numbers).max(axis=1, initial=0) / _STEPS
        if np.any((scale == 0) & numbers.any(axis=1)):
            raise UnfitValue("a vector is too small for its int8 scale", rule="underflow")
        records["scale"] = scale
        records["numbers"] = np.rint(numbers / np.where(scale == 0, 1, scale)[:, None])


def unfit(layout: Layout, numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mask bool[n] of the rows that `quantize` refuses with UnfitValue for this layout."""
    finite = np.asarray(np.isfinite(numbers).all(axis=1))
    is_unfit: NDArray[np.bool_] = ~finite
    if layout.precision == "f4":
        return is_unfit
    finite_numbers = np.where(finite[:, None], numbers, 0)
    largest = np.abs(finite_numbers).max(axis=1, initial=0)
    if layout.precision == "i1":
        is_unfit |= (largest / _STEPS == 0) & finite_numbers.any(axis=1)
        return is_unfit
    exponents = np.frexp(largest)[1] - _TOP_EXPONENT
    beyond = (exponents < -128) | (exponents > 127)
    halves = _halves(finite_numbers, np.where(beyond, 0, -exponents))
    is_unfit |= beyond | _underflow_mask(layout, finite_numbers, halves).any(axis=1)
    return is_unfit


def dequantize(
    layout: Layout, records: NDArray[Any], dtype: type[np.floating[Any]]
) -> NDArray[Any]:
    """Numbers[n, width] of records[n], unused slots included, in float32 or float64."""
    numbers = records["numbers"].astype(dtype)
    if layout.precision == "f2":
        numbers *= np.ldexp(dtype(1), records["exponent"].astype(np.int32))[:, None]
    elif layout.precision == "i1":
        numbers *= records["scale"].astype(dtype)[:, None]
    return numbers


def _check_finite(numbers: NDArray[np.float32]) -> None:
    if not np.isfinite(numbers).all():
        row = int(np.flatnonzero(~np.isfinite(numbers).all(axis=1))[0])
        raise UnfitValue(f"row {row} holds a non-finite number", rule="non_finite", row=row)


def _put_halves(layout: Layout, records: NDArray[Any], numbers: NDArray[np.float32]) -> None:
    # frexp: largest = fraction * 2**e with fraction in [0.5, 1), so value * 2**(15 - e) lies in [2**14, 2**15).
    exponents = np.frexp(np.abs(numbers).max(axis=1, initial=0))[1] - _TOP_EXPONENT
    if exponents.size and (int(exponents.min()) < -128 or int(exponents.max()) > 127):
        raise UnfitValue("a record's numbers need an exponent outside -128..127", rule="overflow")
    halves = _halves(numbers, -exponents)
    # Of truths: numbers are counted slowly, and hold the interpreter's lock.
    if np.count_nonzero(halves.view(np.uint16) & 0x7FFF != 0) != np.count_nonzero(numbers != 0):
        _check_kept(layout, numbers, halves)
    records["exponent"] = exponents
    records["numbers"] = halves


def _halves(numbers: NDArray[np.float32], powers: NDArray[np.int32]) -> NDArray[np.float16]:
    """`numbers * 2**powers` per row, rounded once: to float16.

    The product is exact in float32 where the power itself is one: all that falls below its normal numbers is zero in
    float16 as well.
    """
    if powers.max(initial=0) <= _POWER_MAX:
        return (numbers * np.ldexp(np.float32(1), powers)[:, None]).astype(np.float16)
    return np.ldexp(numbers.astype(np.float64), powers[:, None]).astype(np.float16)


def _check_kept(layout: Layout, numbers: NDArray[np.float32], halves: NDArray[np.float16]) -> None:
    is_lost = _underflow_mask(layout, numbers, halves)
    if is_lost.any():
        row = int(np.flatnonzero(is_lost.any(axis=1))[0])
        raise UnfitValue(
            f"row {row} spans more than float16 holds: a non-zero number would become zero (store it as f4)",
            rule="underflow",
            row=row,
        )


def _underflow_mask(
    layout: Layout, numbers: NDArray[np.float32], halves: NDArray[np.float16]
) -> NDArray[np.bool_]:
    is_lost: NDArray[np.bool_] = (halves == 0) & (numbers != 0)
    if layout.kind == "vector":
        is_lost &= (halves == 0).all(axis=1)[:, None]
    return is_lost
