"""Foresight of loads that a scheduler would end: at the governor's floor they take longer than a try may. Pure."""

from typing import Final

from cache.config.night import NightConfig

MIB: Final = 1 << 20


def floor_seconds(config: NightConfig, size_bytes: float) -> float:
    """Seconds that moving these bytes takes at most beside readers: at `[governor] floor_mib_s`."""
    return size_bytes / (config.governor.floor_mib_s * MIB)


def time_limit_remark(config: NightConfig, size_bytes: float) -> str | None:
    """Remark on the limits of `[dag]` that a load, or reading its pages back, may exceed; None where there is none."""
    seconds = floor_seconds(config, size_bytes)
    limits = {
        "load_timeout_s": config.dag.load_timeout_s,
        "verify_timeout_s": config.dag.verify_timeout_s,
    }
    short = {name: limit for name, limit in limits.items() if seconds > limit}
    if not short:
        return None
    allowed = " and ".join(f"{name} ({limit:,.0f} s)" for name, limit in short.items())
    floor = size_bytes / (min(short.values()) * MIB)
    return (
        f"beside busy readers {size_bytes / 1e9:,.1f} GB of pages take up to {seconds:,.0f} s, at floor_mib_s "
        f"({config.governor.floor_mib_s:g} MiB/s), and Airflow ends a try after {allowed}: raise "
        f"{' and '.join(short)} in [dag], or floor_mib_s in [governor] beyond {floor:,.3g}"
    )
