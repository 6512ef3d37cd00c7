"""Optional dependencies: the one line that names what is missing and the command that installs it."""

from importlib.util import find_spec
from typing import Final

DISTRIBUTION: Final = "larder-predictions"
"""Name that pip installs Larder by; `larder` on the package index is somebody else's project."""
PRECOMPUTE: Final = ("onnx", "pyarrow", "rich", "scipy")
"""Modules of the extra `precompute`."""
SERVING: Final = ("fastapi", "httptools", "prometheus_client", "uvicorn")
"""Modules of the extra `serving`."""


def install_command(extra: str) -> str:
    """Return the shell command that installs Larder with an extra, or several joined by commas."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing(dependent: str, extra: str, *modules: str) -> str | None:
    """Message for an installation that lacks top-level `modules` which `dependent` needs; None if all are there."""
    absent = [module for module in modules if find_spec(module) is None]
    if not absent:
        return None
    return f"{dependent} needs {', '.join(absent)}, not installed here: {install_command(extra)}"
