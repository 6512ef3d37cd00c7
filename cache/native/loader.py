"""Loader of the compiled functions, or of `pure` if they were not built, and the table of numerals that they share."""

import importlib
import logging
import os
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.native import pure
from cache.records import OFFSET_BY_FIELD

if TYPE_CHECKING:
    kernels = pure

FUNCTIONS_VERSION = 6
"""Version of the functions and their arguments; a build with another version is not used."""

NUMERAL_DROPPED_BITS: Final = 13
"""Number of low bits of a float32 that are 0 in a float16 times a power of two; the other bits are a key of
`Numerals`."""

NUMERAL_BYTES: Final = 16
"""Bytes per number in `Numerals`: one byte with the text's length (0: not written yet), then the text."""

_NUMERAL_TOO_LONG_MARK: Final = NUMERAL_BYTES
_log = logging.getLogger(__name__)


def __getattr__(name: str) -> ModuleType:
    """Load `kernels`, the functions that this process uses, at first use.

    Raises ConfigError for a bad LARDER_COLUMNS.
    """
    if name != "kernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = module = load_kernels(os.environ)
    return module


def load_kernels(environ: Mapping[str, str]) -> ModuleType:
    """Return the compiled functions; `pure` if they are missing or outdated, or if LARDER_COLUMNS is off.

    Raises ConfigError for a LARDER_COLUMNS other than auto or off, and if the compiled record layout differs from that
    of `cache.records`.
    """
    columns_setting = environ.get("LARDER_COLUMNS", "auto")
    if columns_setting not in ("auto", "off"):
        raise ConfigError(f"LARDER_COLUMNS must be auto or off, not {columns_setting!r}")
    if columns_setting == "off":
        return pure
    try:
        module = importlib.import_module("cache.native._columns")
    except ImportError as error:
        _log.info("batches are computed without the compiled functions (%s)", error)
        return pure
    if module.VERSION != FUNCTIONS_VERSION:
        _log.warning("cache.native._columns was built from other sources: install again")
        return pure
    _demand_layout(module.LAYOUT)
    return module


def _demand_layout(compiled_layout: Mapping[str, int]) -> None:
    expected_layout = {**OFFSET_BY_FIELD, "numeral": NUMERAL_BYTES, "dropped_bits": NUMERAL_DROPPED_BITS}
    for layout_field, compiled_number in compiled_layout.items():
        if expected_layout.get(layout_field) != compiled_number:
            raise ConfigError(
                f"cache.native._columns was compiled with {layout_field} = {compiled_number}, cache.records has "
                f"{expected_layout.get(layout_field)}: change cache/native/rows.h and install again",
                name=layout_field,
            )


class Numerals:
    """Table of numbers as JSON texts, each written once: 8 MiB of address space; only written pages take memory.

    A float16 times a power of two has so few values that each has its own row.
    """

    def __init__(self) -> None:
        self.text_rows: NDArray[np.uint8] = np.zeros((1 << (32 - NUMERAL_DROPPED_BITS), NUMERAL_BYTES), np.uint8)

    def write(self, numeral_keys: Iterable[int]) -> None:
        """Write finite numbers that are missing; mark a number whose text is too long."""
        new_keys = np.unique(np.fromiter(numeral_keys, np.uint32))
        numbers = (new_keys << np.uint32(NUMERAL_DROPPED_BITS)).view(np.float32)
        number_texts = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
        for key, text in zip(new_keys.tolist(), number_texts, strict=True):
            if len(text) < NUMERAL_BYTES:
                self.text_rows[key, 1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
            self.text_rows[key, 0] = min(len(text), _NUMERAL_TOO_LONG_MARK)
