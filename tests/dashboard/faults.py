"""Faults of a JSON document by the contract of the dashboard."""

import math
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from tests.dashboard.contract import Dashboard


def faults(data: object) -> list[str]:
    """Return what keeps a decoded JSON from being a Dashboard, each with its path; additional fields are allowed."""
    contract_faults = _faults(data, Dashboard, "")
    return contract_faults or _uneven(data)


def _faults(value: object, kind: Any, location: str) -> list[str]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return _of_any(value, parts, location)
    if origin is Literal:
        return [] if value in parts else [f"{location}: {value!r} is none of {parts}"]
    if kind is Any or (kind is NoneType and value is None):
        return []
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return [] if is_number and math.isfinite(value) else [f"{location}: {value!r} is no number"]  # type: ignore[arg-type]
    if is_typeddict(kind):
        if not isinstance(value, dict):
            return [f"{location}: {value!r:.40} is no object"]
        hints = get_type_hints(kind)
        needed = sorted(kind.__required_keys__)
        absent = [f"{location}.{name}: missing" for name in needed if name not in value]
        present = [(name, hint) for name, hint in hints.items() if name in value]
        return absent + [fault for name, hint in present for fault in _faults(value[name], hint, f"{location}.{name}")]
    if origin is list and isinstance(value, list):
        return [e for i, v in enumerate(value) for e in _faults(v, parts[0], f"{location}[{i}]")]
    if origin is dict and isinstance(value, dict):
        return [e for k, v in value.items() for e in _faults(v, parts[1], f"{location}.{k}")]
    is_kind = origin is None and isinstance(value, kind)
    return [] if is_kind else [f"{location}: {value!r:.40} is not {kind}"]


def _of_any(value: object, kinds: tuple[Any, ...], location: str) -> list[str]:
    """Return the faults under the kind that fits best; null fits wherever it is allowed."""
    tried = [_faults(value, kind, location) for kind in kinds if kind is not NoneType or value is None]
    # Report the kind with the deepest fault: the value matched that kind's own type.
    return min(tried, key=lambda kind_faults: (bool(kind_faults), -len(kind_faults[0]) if kind_faults else 0))


def _uneven(data: Any) -> list[str]:
    """Return the lists of the series that are not as long as its times."""
    series = data["series"]
    if series is None:
        return []
    lists = {"requests": series["requests"]}
    for part in ("answers", "stages", "misses", "events"):
        lists |= {f"{part}.{name}": values for name, values in series.get(part, {}).items()}
    for source, quantiles in series["seconds"].items():
        lists |= {f"seconds.{source}.{name}": values for name, values in quantiles.items()}
    bins = len(series["at"])
    return [
        f".series.{name}: {len(series_values)} values for {bins} bins"
        for name, series_values in lists.items()
        if len(series_values) != bins
    ]
