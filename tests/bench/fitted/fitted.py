"""Kinds of models, and one that was fitted."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from precompute.adapters.folder import ImportReport
from tests.bench.fitted.cut import Cut
from tests.bench.tools.harness import versions


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted model: its import into a folder, and the asked users' lists [asked, TOP] as its library makes them."""

    put: Callable[[Path], ImportReport]
    lists: Callable[[], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model: its library's distribution, and the module beside this one and the function that fit it."""

    library: str
    module: str
    function: str

    def fit(self, cut: Cut) -> Fitted:
        """Fit the model; raise ImportError if its library is missing."""
        fit: Callable[[Cut], Fitted] = getattr(import_module(f"{__package__}.{self.module}"), self.function)
        return fit(cut)

    def version(self) -> str:
        """Installed version of the library, "" if it is missing."""
        installed_version = versions((self.library,))[self.library]
        return "" if installed_version == "absent" else installed_version
