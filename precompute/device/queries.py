"""Users on a torch device, as a search wants them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Users [n, ...] in the units of the items: `codes` half, `length` and `residual` float32 [n], rounded up.

    `size` float64 [n] are the lengths of the vectors as they came.
    """

    exact: torch.Tensor
    cosine_lengths: torch.Tensor | None
    codes: torch.Tensor
    length: torch.Tensor
    residual: torch.Tensor
    scale: torch.Tensor
    size: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of these users."""
        always = (self.exact, self.codes, self.length, self.residual, self.scale, self.size)
        return always if self.cosine_lengths is None else (*always, self.cosine_lengths)
