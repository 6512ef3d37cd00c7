"""Report of an import: what was made, how good it is, and what it cannot do."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """Findings about an imported model; `recalls`: held-out recall@20 of fold-ins, `agreement`: of the int8 form."""

    folder: str
    model: str
    items: int
    users: int
    clicks: int
    dims: int
    metric: str
    fold_in: str
    recalls: dict[str, float]
    agreement: dict[str, Any]
    bundle_bytes: int
    seconds: float
    cannot: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON object of all of it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For eyes, a finding a line."""
        tried = ", ".join(f"{name} {each:.4f}" for name, each in self.recalls.items())
        overlap = self.agreement.get("overlap_at_20")
        size = f"{self.items:,} items, {self.users:,} users with vectors, {self.clicks:,} clicks"
        return [
            f"{self.model}: {size}, {self.dims} dimensions, {self.metric}",
            f"a history becomes a vector by {self.fold_in}"
            + (f" (recall@20 of what was held out: {tried})" if tried else ""),
            *(
                [f"the int8 form finds {overlap:.4f} of the exact top 20"]
                if overlap is not None
                else []
            ),
            f"{self.bundle_bytes:,} bytes in {self.seconds:.1f} s",
            *(f"cannot: {each}" for each in self.cannot),
            f"next: cd {self.folder}, then larder night and larder serve",
        ]
