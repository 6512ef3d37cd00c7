"""A night in one process, as its steps see it, and what each step tells of itself."""

from dataclasses import dataclass, field

from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig


@dataclass(frozen=True, slots=True)
class Night:
    """Values that any step may need; `build` is what `begin` returned, empty before it.

    `data_until`, `run_after` and `named` are times (ISO 8601) as `begin` wants them. `attempt` names this try: a repeat
    of a publish is recognised by it.
    """

    config: NightConfig
    attempt: str
    data_until: str | None = None
    run_after: str | None = None
    named: str | None = None
    progress: Progress = quiet
    build: Step = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRow:
    """Result of a step and its row in a night's table: how many, and bytes, are 0 where they have no meaning.

    `summary` may have several lines.
    """

    result: Step
    summary: str
    count: int = 0
    unit: str = ""
    size_bytes: int = 0

    def rate(self, seconds: float) -> str:
        """Rate per second, for people; empty where nothing is counted."""
        if not self.count:
            return ""
        per_second = self.count / max(seconds, 1e-9)
        return (
            f"{size_text(per_second)}/s" if self.unit == "B" else f"{per_second:,.0f} {self.unit}/s"
        )


def size_text(size_bytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:,.1f} {unit}" if unit != "B" else f"{size_bytes:,.0f} B"
        size_bytes /= 1024
    raise AssertionError
