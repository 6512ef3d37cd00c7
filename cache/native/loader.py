"""Loader of a batch's work per record: compiled (`native/columns.c`), or where it was not built `pure`, slower."""

import importlib
import logging
import os
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from cache.errors import ConfigError
from cache.format.records.layout import OFFSETS
from cache.native import pure
from cache.native.number_text import DROPPED_BITS, NUMERAL_BYTES

VERSION = 6
"""Version of the functions and their arguments: what was built from other sources is left alone."""

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    kernels = pure


def __getattr__(name: str) -> ModuleType:
    """`kernels`, the functions that this process uses: what is wrong with LARDER_COLUMNS is told at first use."""
    if name != "kernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = module = load(os.environ)
    return module


def load(environ: Mapping[str, str]) -> ModuleType:
    """The compiled functions; `pure` if they are missing, of other sources, or LARDER_COLUMNS is off.

    Raises ConfigError unless that is auto or off, and for records laid out otherwise than in `cache.format.records`.
    """
    mode = environ.get("LARDER_COLUMNS", "auto")
    if mode not in ("auto", "off"):
        raise ConfigError(f"LARDER_COLUMNS must be auto or off, not {mode!r}")
    if mode == "off":
        return pure
    try:
        module = importlib.import_module("cache.native._columns")
    except ImportError as error:
        _log.info("batches without what is compiled (%s)", error)
        return pure
    if module.VERSION != VERSION:
        _log.warning("cache.native._columns was built from other sources: install again")
        return pure
    _demand_layout(module.LAYOUT)
    return module


def _demand_layout(compiled: Mapping[str, int]) -> None:
    described = {**OFFSETS, "numeral": NUMERAL_BYTES, "dropped_bits": DROPPED_BITS}
    for name, number in compiled.items():
        if described.get(name) != number:
            raise ConfigError(
                f"cache.native._columns was compiled with {name} = {number}, cache.format.records.layout has "
                f"{described.get(name)}: change cache/native/rows.h and install again",
                name=name,
            )
