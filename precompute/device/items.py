"""Items on a torch device: float32 for the scores that decide, half precision for the products that choose."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.topk.compiled import own_lengths
from cache.topk.flat import Compared
from precompute.device.exact import SUMS, in_order

LANES = 64
"""Groups of a block."""
ABREAST, PAIR = 4, 2
"""Neighbouring columns are a pair of one group, then of the next, four groups in turn: what a thread of a GPU holds of
a row of a product is then of one group, whose largest needs no other thread."""

_ROUND_UP = 1 + 1e-5
_LEAST = 1e-12
_NORMAL = {torch.float16: 2.0**-14}
"""Smaller numbers are left to the residual: not every GPU multiplies them."""
_OUT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}
UNDERFLOW = 2.0**-24
_MULTIPLE = 8
_PART = 1 << 16
_PROBED = 256
_GROUP_MOST, _GROUP_LEAST = 64, 4
_CANDIDATES = 128


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Users [n, ...] in the units of the items: `codes` half, `length` and `residual` float32 [n], rounded up.

    `size` float64 [n] are the lengths of the vectors as they came.
    """

    exact: torch.Tensor
    own: torch.Tensor | None
    codes: torch.Tensor
    length: torch.Tensor
    residual: torch.Tensor
    scale: torch.Tensor
    size: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Some items, longest first, as the columns of a product, in groups of `size` that share a bound.

    Four groups have `4 * size` columns, pair by pair in turn (`columns_of`), and `LANES` groups are a block. `exact`
    float32 [groups, steps, size, 4] are their vectors `in_order`: what is added in one step lies side by side.
    `ordinals` int64 [columns], `places` int64 [items + 1] the other way round (-1 where left out; the last entry is
    nobody's); `longest` and `residual` float32 [groups], rounded up; `padding` are the columns that are no items.
    """

    codes: torch.Tensor
    exact: torch.Tensor
    ordinals: torch.Tensor
    places: torch.Tensor
    longest: torch.Tensor
    residual: torch.Tensor
    padding: torch.Tensor
    size: int

    @property
    def block(self) -> int:
        """Columns of one block: a product covers whole ones."""
        return self.size * LANES

    def columns_of(self, groups: torch.Tensor) -> torch.Tensor:
        """int64 [..., size]: the columns of some groups [...]."""
        member = torch.arange(self.size, device=groups.device)
        inside = member // PAIR * (ABREAST * PAIR) + member % PAIR
        first = groups // ABREAST * (ABREAST * self.size) + groups % ABREAST * PAIR
        return first[..., None] + inside

    def members_of(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(groups, places in them) int64 of some columns."""
        apart = ABREAST * PAIR
        group = columns // (ABREAST * self.size) * ABREAST + columns % apart // PAIR
        return group, columns // apart % (self.size // PAIR) * PAIR + columns % PAIR

    def largest(self, product: torch.Tensor) -> torch.Tensor:
        """The largest of each group, [n, groups], of a product [n, columns] of whole blocks."""
        rows = product.view(len(product), -1, self.size // PAIR, ABREAST * PAIR).amax(2)
        return rows.view(len(product), -1, PAIR).amax(2)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceItems:
    """All items; `order` int64 [items] holds ordinals by falling length, `codes`, `length`, `residual` follow it.

    `own` float32 [items] are the lengths by ordinal of items that are compared by the cosine.
    """

    own: torch.Tensor | None
    order: torch.Tensor
    codes: torch.Tensor
    length: torch.Tensor
    residual: torch.Tensor
    scale: float
    error: float
    """A product's rounding and that of the exact score, relative to both lengths."""
    group: int | None
    """Items that share a bound; None: as many as suits their number."""
    whole: Columns

    @classmethod
    def of(
        cls, compared: Compared, device: torch.device, dtype: torch.dtype, group: int | None = None
    ) -> Self:
        """Raises torch.OutOfMemoryError where the device has no room for them."""
        dims = compared.vectors.shape[1]
        scale = float(np.ldexp(1.0, -int(np.frexp(compared.longest)[1])))
        order = np.argsort(-compared.sizes, kind="stable")
        size = group or _group_of(len(order))
        exact = _laid(len(order), size, dims, device)
        parts = []
        for start in range(0, len(order), _PART):  # so that copies on their way stay small
            part = order[start : start + _PART]
            parts.append(encoded(moved(compared.filtering[part], device), scale, dtype))
            _lay(exact, start, in_order(moved(compared.vectors[part], device)))
        codes, length, residual = (torch.cat(each) for each in zip(*parts, strict=True))
        own = own_lengths(compared.vectors) if compared.metric == "cosine" else None
        where = moved(order, device)
        return cls(
            None if own is None else moved(own, device), where, codes, length, residual, scale,
            _OUT[dtype] + (dims + 16) * (2.0**-22 + 2.0**-23) + 2.0**-20,
            group, _columns(codes, exact, length, residual, where, len(order), size),
        )  # fmt: skip

    def holds(self) -> bool:
        """True if this device's products keep to the error that is allowed for: float32 sums, none of its numbers lost.

        Tried on positive numbers, whose partial sums are as large as they get: sums in half precision show.
        """
        device, dtype = self.codes.device, self.codes.dtype
        users = np.random.default_rng(0).random((_PROBED, self.codes.shape[1]), np.float32)
        users /= self.codes.shape[1]  # no longer than one
        codes, length, _ = encoded(moved(users, device), 1.0, dtype)
        some = self.codes[:: max(1, len(self.codes) // _PROBED)].abs()
        exact = codes.double() @ some.double().T
        error = (codes @ some.T).double() - exact
        allowed = self.error * length[:, None] * some.double().square().sum(1).sqrt() + UNDERFLOW
        return bool((error.abs() <= allowed).all())

    def only(self, allowed: torch.Tensor) -> Columns:
        """The columns of some items; `allowed` bool [items] by ordinal."""
        ranks = allowed[self.order].nonzero()[:, 0]
        size = self.group or _group_of(len(ranks))
        exact = _laid(
            len(ranks),
            size,
            self.whole.exact.shape[1] * self.whole.exact.shape[3],
            self.codes.device,
        )
        for start in range(0, len(ranks), _PART):
            some = ranks[start : start + _PART]
            _lay(exact, start, self.whole.exact[some // self.whole.size, :, some % self.whole.size])
        return _columns(
            self.codes[ranks], exact, self.length[ranks], self.residual[ranks], self.order[ranks], len(self.order),
            size,
        )  # fmt: skip

    def queries(self, users: NDArray[np.float32], compared: NDArray[np.float32]) -> Queries:
        """Users float32 [n, dims] as scored and as compared (unit vectors for cosine)."""
        device = self.codes.device
        ours = moved(users, device)
        theirs = ours if compared is users else moved(compared, device)
        size, length = (each.double().square().sum(1).sqrt() for each in (ours, theirs))
        scale = torch.ldexp(torch.ones_like(length), -torch.frexp(length).exponent).to(
            torch.float32
        )
        own = None if self.own is None else moved(own_lengths(users), device)
        return Queries(
            in_order(ours), own, *encoded(theirs, scale[:, None], self.codes.dtype), scale, size
        )

    def pairs(
        self, gone: Histories, rows: slice | NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, ordinal) int64 of all that some users have; an ordinal that is not one is the number of items."""
        if isinstance(rows, slice):  # neighbours' histories lie side by side
            indptr = gone.indptr[rows.start : rows.stop + 1]
            indices = gone.indices[indptr[0] : indptr[-1]]
        else:
            part = gone.take(rows)
            indptr, indices = part.indptr, part.indices
        device, items = self.codes.device, len(self.order)
        counts, ordinals = (moved(each, device) for each in (np.diff(indptr), indices))
        owners = torch.arange(len(counts), device=device)
        owners = owners.repeat_interleave(counts, output_size=len(indices))
        return owners, torch.where((ordinals >= 0) & (ordinals < items), ordinals, items)

    def margin(
        self, columns: Columns, groups: slice, length: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """float32 [n, groups]: what a product may differ from the score, both vectors scaled.

        `length` and `residual` [n] are the users'. With codes q and rests r: |u v - q q'| <= |q| |r'| + |r| |v|, and
        the sums are rounded.
        """
        longest, rest = columns.longest[groups], columns.residual[groups]
        weight = rest + self.error * (longest + rest)
        return (length + residual)[:, None] * weight + residual[:, None] * longest + UNDERFLOW


def encoded(
    vectors: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [n, width], lengths float32 [n], residual lengths float32 [n]) of float32 [n, dims] times `scale`.

    Scales are powers of two: nothing is rounded but by the code itself. What is rounded is measured, not estimated.
    """
    scaled = vectors * scale
    codes = scaled.to(dtype)
    if (least := _NORMAL.get(dtype)) is not None:
        codes = torch.where(codes.abs() < least, torch.zeros_like(codes), codes)
    rest = (scaled - codes.to(torch.float32)).double()
    length, residual = (_above(each.square().sum(1).sqrt()) for each in (scaled.double(), rest))
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % _MULTIPLE)), length, residual


def moved(array: NDArray[np.float32] | NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Tensor of an array on the device; to a GPU from pinned memory, so that the copy waits for nobody."""
    found = torch.from_numpy(
        np.require(array, requirements=("C", "W"))
    )  # torch shares no memory that is read-only
    if device.type != "cuda":
        return found
    return found.pin_memory().to(device, non_blocking=True)


def fetched(found: torch.Tensor) -> torch.Tensor:
    """Tensor on its way to the host, into pinned memory: there once the stream has settled."""
    if found.device.type != "cuda":
        return found
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return host.copy_(found, non_blocking=True)


def slice_of(rows: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """The same rows as a slice if they are neighbours in ascending order: nothing is then copied to read them."""
    together = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    return slice(int(rows[0]), int(rows[-1]) + 1) if together else rows


def _above(lengths: torch.Tensor) -> torch.Tensor:
    return (lengths * _ROUND_UP + _LEAST).to(torch.float32)


def _group_of(count: int) -> int:
    """Items of a group, of so many: reading a group's K best costs about as much as its column is wide."""
    wanted = max(1, count // _CANDIDATES) ** 0.5  # where both are small
    return min(_GROUP_MOST, max(_GROUP_LEAST, 1 << round(float(np.log2(wanted)))))


def _columns_for(count: int, size: int) -> int:
    """Columns of so many items, in whole blocks."""
    block = size * LANES
    return -(-max(1, count) // block) * block


def _laid(count: int, size: int, dims: int, device: torch.device) -> torch.Tensor:
    """float32 [groups, steps, size, 4] for the vectors of so many items, zeros."""
    steps = -(-dims // SUMS)
    return torch.zeros((_columns_for(count, size) // size, steps, size, SUMS), device=device)


def _lay(exact: torch.Tensor, rank: int, vectors: torch.Tensor) -> None:
    """Puts vectors [n, steps, 4] where they belong, from some rank on that is a multiple of a group's size."""
    size = exact.shape[2]
    whole = len(vectors) // size
    first = rank // size
    for start, count, each in ((0, whole, size), (whole, len(vectors) % size, 1)):
        part = vectors[start * size : start * size + count * each]
        if each == size:
            exact[first : first + whole] = part.view(whole, size, *vectors.shape[1:]).transpose(
                1, 2
            )
        elif count:
            exact[first + whole, :, :count] = part.transpose(0, 1)


def _columns(
    codes: torch.Tensor, exact: torch.Tensor, length: torch.Tensor, residual: torch.Tensor, order: torch.Tensor,
    items: int, size: int,
) -> Columns:  # fmt: skip
    """Columns of all the given items by rank; `items` counts all there are."""
    count, device = len(order), codes.device
    total = _columns_for(count, size)
    ranks = torch.arange(total, device=device).view(-1, ABREAST, size // PAIR, PAIR)
    ranks = ranks.transpose(1, 2).reshape(-1)
    known = ranks < count
    laid = torch.zeros((total, codes.shape[1]), dtype=codes.dtype, device=device)
    laid[known] = codes[ranks[known]]
    ordinals = torch.full((total,), items, device=device)
    ordinals[known] = order[ranks[known]]
    places = torch.full((items + 1,), -1, device=device)
    places[ordinals[known]] = known.nonzero()[:, 0]
    pad = (0, total - count)
    longest, rest = (
        torch.nn.functional.pad(each, pad).view(-1, size).amax(1) for each in (length, residual)
    )
    return Columns(
        laid, exact, ordinals, places, longest, rest, (~known).nonzero()[:, 0], size
    )  # fmt: skip
