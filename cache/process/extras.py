"""Optional dependencies: the one line that names what is missing and the command that installs it."""

from importlib.util import find_spec

PRECOMPUTE = ("onnx", "pyarrow", "rich", "scipy")
"""Modules of the extra `precompute`."""


def missing(who: str, extra: str, *modules: str) -> str | None:
    """Message for an installation that lacks top-level `modules` which `who` needs; None if all are there."""
    absent = [module for module in modules if find_spec(module) is None]
    if not absent:
        return None
    return f"{who} needs {', '.join(absent)}, not installed here: pip install 'larder[{extra}]'"
