"""`Scorer` on a torch device: slabs of users one after the other there, while others are copied in and out."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from cache.errors import LarderError
from cache.model.ranking import Metric, unit
from cache.model.tower import Histories
from cache.topk.compiled import fits, long_enough
from cache.topk.flat import Compared, Top, lengths
from cache.topk.topk import Scorer, checked
from precompute.config.device_failures import is_full, is_of_device
from precompute.device.columns import Columns
from precompute.device.exact import same_bits, unpacked
from precompute.device.items import DeviceItems, fetched, slice_of
from precompute.device.probe import kernels_for
from precompute.device.search import SearchShape, search, shape_of

UNDER_WAY = 3
"""Slabs under way with a GPU: one is searched for, one is loaded or waits, and one is fetched. Searches run in one
stream: side by side they would end together, and the GPU would then wait for all to be fetched."""
_FETCHED = ((8, 16), (4, 480))
"""Candidates beside k, a share of it and some: at first, and again for the few whose list was not certain."""
_SHARE = 0.5
_PROCESSOR_BYTES = 256 << 20
_SIZES = (1e-36, 1e36)
"""Lengths that a power of two scales to one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Request of one call of `top`, and the arrays that its answer fills; `fused` where the kernels are to do it."""

    users: NDArray[np.float32]
    k: int
    gone: Histories
    columns: Columns
    out: Top
    told: Callable[[int], None]
    room_bytes: int
    fused: ModuleType | None = None
    estimating: bool = False


class DeviceScorer:
    """Items on one device, ready to be searched exactly; answers with the bits of `Scorer`."""

    def __init__(self, compared: Compared, items: DeviceItems, fused: ModuleType | None) -> None:
        self._compared = compared
        self._items = items
        self._fused = fused
        self._device = items.codes.device
        self._changing = threading.Lock()
        self._parts = 1
        self._launching = threading.Lock()
        is_gpu = self._device.type == "cuda"
        self._stream, self._loads, self._copies = (
            torch.cuda.Stream(self._device) if is_gpu else None for _ in range(3)
        )
        self.has_failed = False
        """True if the device gave up for good: the processor then does the rest."""

    @classmethod
    def of(
        cls,
        vectors: NDArray[np.float32],
        metric: Metric,
        device: str,
        *,
        dtype: torch.dtype | None = None,
        fused: bool | None = None,
    ) -> Self | None:
        """Scorer, as by `Scorer.of`; None, and why in the log, where the device cannot be relied on or has no room.

        `dtype` is that of the products: half on a GPU, float32 elsewhere; `fused` False leaves the kernels out, True
        has them run elsewhere than on a GPU too.
        """
        where = torch.device(device)
        # Half-precision products are summed in float32, and float32 ones are not rounded to TF32.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_tf32 = False
        compared = Compared.of(np.ascontiguousarray(vectors), metric)
        sizes = lengths(compared.vectors) if metric == "cosine" else compared.sizes
        certain = len(sizes) > 0 and _SIZES[0] < sizes.max() < _SIZES[1]
        if not certain or (metric == "cosine" and not fits(compared, compared.vectors).all()):
            _log.warning("the lengths of these vectors are beyond what %s is certain about", device)
            return None
        chosen = dtype or (torch.float32 if where.type == "cpu" else torch.float16)
        try:
            if not same_bits(vectors.shape[1], where):
                _log.warning("%s adds in another order than this numpy: not used", device)
                return None
            faster = (
                kernels_for(vectors.shape[1], where, fused) if chosen == torch.float16 else None
            )
            group = faster.GROUP if faster else None
            items = DeviceItems.of(compared, where, chosen, group)
            _settle(where)
            if not items.holds():
                _log.warning("the products of %s are rougher than %s is: not used", device, chosen)
                return None
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            _log.warning("%s cannot hold %d items: %s", device, len(sizes), error)
            return None
        return cls(compared, items, faster)

    def top(
        self,
        users: NDArray[np.float32],
        k: int,
        excluded: Histories | None = None,
        *,
        allowed: NDArray[np.bool_] | None = None,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Top:
        """Top K of each user, as `Scorer.top` gives it; `threads` are those of what is left to the processor."""
        # That users are finite shows in their lengths, which the device finds.
        users, gone = checked(self._compared, users, k, excluded, allowed, values=False)
        out = np.empty((len(users), k), np.uint32), np.empty((len(users), k), np.float32)
        told = progress or (lambda _: None)
        left = np.arange(len(users))
        try:
            asked = _Asked(users, k, gone, self._columns(allowed), out, told, self._room_bytes())
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            self._give_up(error)
        else:
            # Bounds in half precision cannot tell everything: last come the operators.
            attempts = [(each, self._fused) for each in _FETCHED]
            attempts += [(_FETCHED[-1], None)] * (self._fused is not None)
            for turn, ((share, some), by) in enumerate(attempts):
                if len(left) and not self.has_failed:
                    attempt = replace(asked, fused=by, estimating=turn == 0)
                    left = self._attempt(attempt, left, k + k // share + some)
        if len(left):
            rest = self._whole_rest if self.has_failed else self._few
            part = rest.top(
                users[left], k, gone.take(left), allowed=allowed, threads=threads, progress=told
            )
            out[0][left], out[1][left] = part
        return out

    @cached_property
    def _few(self) -> Scorer:
        """Scorer for lists that no number of candidates makes certain: not worth laying the items out."""
        return Scorer.of(self._compared.vectors, self._compared.metric, engine=False)

    @cached_property
    def _whole_rest(self) -> Scorer:
        return Scorer.of(self._compared.vectors, self._compared.metric)

    def _columns(self, allowed: NDArray[np.bool_] | None) -> Columns:
        if allowed is None or self.has_failed:
            return self._items.whole
        columns = self._items.only(torch.from_numpy(allowed).to(self._device))
        _settle(self._device)
        return columns

    def _attempt(self, asked: _Asked, rows: NDArray[np.int64], fetch: int) -> NDArray[np.int64]:
        """Scores some users; those of them whose list is not certain."""
        step = self._shape(asked, fetch).users
        slabs = [rows[start : start + step] for start in range(0, len(rows), step)]
        with ThreadPoolExecutor(UNDER_WAY if self._stream else 1, "device") as pool:
            return np.concatenate([*pool.map(partial(self._slab, asked, fetch), slabs)])

    def _slab(self, asked: _Asked, fetch: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Searches for users, in smaller pieces where the device runs out of memory; the rows left to others."""
        pieces, left = [rows], []
        while pieces:
            piece = pieces.pop()
            if self.has_failed:
                left.append(piece)
                continue
            shape = self._shape(asked, fetch)
            if len(piece) > shape.users:
                pieces += np.array_split(piece, -(-len(piece) // shape.users))
                continue
            by = self._by_kernels(asked, fetch)
            try:
                uncertain = self._search(asked, shape, piece)
            except LarderError:
                raise
            except Exception as error:  # Triton's compiler and its cache raise what they like
                if is_full(error):
                    self._shrink(asked, shape, error)
                elif self.has_failed or is_of_device(error):
                    self._give_up(error)
                elif by is not None:
                    self._leave_kernels(error)
                else:
                    raise
                pieces.append(piece)
                continue
            left.append(uncertain)
            asked.told(len(piece) - len(uncertain))
        return np.sort(np.concatenate(left))  # pieces are taken last first

    def _search(
        self, asked: _Asked, shape: SearchShape, rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        where = slice_of(rows)
        users = np.ascontiguousarray(asked.users[where])
        compared = unit(users) if self._compared.metric == "cosine" else users
        with torch.cuda.stream(self._loads):
            queries = self._items.queries(users, compared)
            pairs = self._items.pairs(asked.gone, where)
            loaded = None if self._loads is None else self._loads.record_event()
        with self._launching, torch.cuda.stream(self._stream):
            if self._stream is not None and loaded is not None:
                self._stream.wait_event(loaded)
                for tensor in (*queries.tensors(), *pairs):
                    tensor.record_stream(self._stream)
            by = self._by_kernels(asked, shape.fetch)
            keys, certain = (by.search if by else search)(
                self._items, asked.columns, queries, pairs, asked.k, shape
            )
            found, done = self._fetched((*unpacked(keys), certain, queries.size))
        if done is not None:
            done.synchronize()
        ordinals, scores, sure, sizes = (each.numpy() for each in found)
        if not np.isfinite(sizes).all():
            checked(self._compared, asked.users, asked.k, None, None)
        # Lists that are not certain are written again by whoever makes them so.
        asked.out[0][where], asked.out[1][where] = ordinals.view(np.uint32), scores
        usual = (sizes == 0) | ((sizes > _SIZES[0]) & (sizes < _SIZES[1]))
        uncertain: NDArray[np.int64] = rows[~(sure & usual & long_enough(self._compared, sizes))]
        return uncertain

    def _fetched(
        self, found: tuple[torch.Tensor, ...]
    ) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Tensors on their way to the host, and when they are there: the next slab does not wait for that."""
        if self._stream is None or self._copies is None:
            return [fetched(each) for each in found], None
        self._copies.wait_stream(self._stream)
        with torch.cuda.stream(self._copies):
            copied = [fetched(each) for each in found]
            for each in found:
                each.record_stream(self._copies)
            return copied, self._copies.record_event()

    def _room_bytes(self) -> int:
        """Bytes that one slab may take of what is free now, and of the share of the memory that this process has."""
        if self._device.type != "cuda":
            return _PROCESSOR_BYTES
        free, total = torch.cuda.mem_get_info(self._device)
        used = torch.cuda.memory_allocated(self._device)
        kept = torch.cuda.memory_reserved(self._device) - used
        share = total * torch.cuda.get_per_process_memory_fraction(self._device) - used
        return max(0, int(min(free + kept, share) * _SHARE))

    def _shape(self, asked: _Asked, fetch: int) -> SearchShape:
        """The widest product that has room, of as many users as fill the device."""
        room = asked.room_bytes // self._parts
        by = self._by_kernels(asked, fetch)
        shape: SearchShape = (by.shape_of if by else shape_of)(
            self._items, asked.columns, fetch, room
        )
        return replace(shape, estimating=asked.estimating)

    def _by_kernels(self, asked: _Asked, fetch: int) -> ModuleType | None:
        by = asked.fused and self._fused
        return by if by and by.fits(self._items, asked.columns, fetch) else None

    def _shrink(self, asked: _Asked, shape: SearchShape, error: Exception) -> None:
        """Halves what is done at once from now on; gives up where that is nothing."""
        least = self._by_kernels(asked, shape.fetch) or shape.columns <= asked.columns.block
        if shape.users == 1 and least:
            self._give_up(error)
            return
        with self._changing:
            if self._shape(asked, shape.fetch) == shape:  # else another slab was first
                self._parts *= 2
                _log.info("%s: out of memory with %s; going on with half", self._device, shape)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _leave_kernels(self, error: Exception) -> None:
        """Other kernels than those that were tried at first are compiled when they are wanted, which may fail."""
        with self._changing:
            if self._fused is not None:
                self._fused = None
                _log.warning("%s: kernels failed, torch's operators go on: %r", self._device, error)

    def _give_up(self, error: Exception) -> None:
        with self._changing:
            if not self.has_failed:
                self.has_failed = True
                _log.warning("%s failed, the processor goes on: %s", self._device, error)


def _settle(device: torch.device) -> None:
    """Waits for this thread's stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
