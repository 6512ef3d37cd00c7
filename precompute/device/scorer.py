"""`Scorer` on a torch device: users are searched slab by slab, by the kernels if they are reliable on it."""

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
from cache.model.ranking import Metric, unit_rows
from cache.model.tower import Histories
from cache.topk.compiled import lengths_fit_mask, scores_fit_mask
from cache.topk.flat import ComparableItems, TopLists, row_lengths_of
from cache.topk.topk import Scorer, check_arguments
from precompute.device.columns import Columns
from precompute.device.failures import is_full, is_of_device
from precompute.device.items import DeviceItems, copy_to_host, has_same_bits, slice_if_consecutive, unpack_keys
from precompute.device.search import SearchShape, search, shape_of

_log = logging.getLogger(__name__)

SLABS_UNDER_WAY = 3
"""Number of slabs in progress on a GPU: one is searched, one is loaded or waits, and one is fetched.
All searches run in one stream: concurrent ones would end together, and the GPU would then wait until all are fetched.
"""

_FETCH_MARGINS = ((8, 16), (4, 480))
"""Candidates in addition to k, as (divisor of k, summand): for all users, then for the few uncertain lists."""

_MEMORY_FRACTION = 0.5
_PROCESSOR_BYTES = 256 << 20
_SAFE_LENGTHS = (1e-36, 1e36)
"""Range of lengths that a power of two can scale to about one."""


@dataclass(frozen=True, slots=True, eq=False)
class _SearchRequest:
    """Request of one call of `top`, and the arrays for its answer; `fused` if the kernels are to be used."""

    user_vectors: NDArray[np.float32]
    k: int
    exclusions: Histories
    columns: Columns
    top_lists: TopLists
    on_progress: Callable[[int], None]
    room_bytes: int
    fused: ModuleType | None = None
    is_estimating: bool = False


class DeviceScorer:
    """Items on one device, ready for exact searches; lists are bit-identical to those of `Scorer`."""

    def __init__(self, comparable_items: ComparableItems, items: DeviceItems, fused: ModuleType | None) -> None:
        self._comparable_items = comparable_items
        self._items = items
        self._fused = fused
        self._device = items.item_codes.device
        self._change_lock = threading.Lock()
        self._part_count = 1
        self._launch_lock = threading.Lock()
        is_gpu = self._device.type == "cuda"
        self._stream, self._load_stream, self._copy_stream = (
            torch.cuda.Stream(self._device) if is_gpu else None for _ in range(3)
        )
        self.has_failed = False
        """True if the device has failed permanently: the processor then does the remaining work."""

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
        """Return a scorer as `Scorer.of` does; None, with the reason logged, if the device is unreliable or full.

        `dtype` is that of the products: half on a GPU, float32 elsewhere. `fused` False disables the kernels, True runs
        them also on devices that are not GPUs.
        """
        torch_device = torch.device(device)
        # Half-precision products must be summed in float32, and float32 ones must not be rounded to TF32.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_tf32 = False
        comparable_items = ComparableItems.of(np.ascontiguousarray(vectors), metric)
        vector_lengths = (
            row_lengths_of(comparable_items.vectors) if metric == "cosine" else comparable_items.compared_lengths
        )
        has_safe_lengths = len(vector_lengths) > 0 and _SAFE_LENGTHS[0] < vector_lengths.max() < _SAFE_LENGTHS[1]
        if not has_safe_lengths or (
            metric == "cosine" and not scores_fit_mask(comparable_items, comparable_items.vectors).all()
        ):
            _log.warning("vectors have lengths for which %s cannot compute certain lists: not used", device)
            return None
        product_dtype = dtype or (torch.float32 if torch_device.type == "cpu" else torch.float16)
        try:
            if not has_same_bits(vectors.shape[1], torch_device):
                _log.warning("%s adds in another order than numpy does here: not used", device)
                return None
            fused_kernels = (
                probe_kernels(vectors.shape[1], torch_device, fused) if product_dtype == torch.float16 else None
            )
            group = fused_kernels.GROUP if fused_kernels else None
            items = DeviceItems.of(comparable_items, torch_device, product_dtype, group)
            _synchronize(torch_device)
            if not items.is_within_error_bound():
                _log.warning("the products of %s are less accurate than %s allows: not used", device, product_dtype)
                return None
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            _log.warning("%s cannot hold %d items: %s", device, len(vector_lengths), error)
            return None
        return cls(comparable_items, items, fused_kernels)

    def top(
        self,
        users: NDArray[np.float32],
        k: int,
        excluded: Histories | None = None,
        *,
        allowed: NDArray[np.bool_] | None = None,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TopLists:
        """Return the top K of each user, like `Scorer.top`; `threads` are for users that the processor searches."""
        # The device detects users that are not finite by their lengths.
        users, exclusions = check_arguments(self._comparable_items, users, k, excluded, allowed, check_finite=False)
        top_lists = (np.empty((len(users), k), np.uint32), np.empty((len(users), k), np.float32))
        report_progress = progress or (lambda _: None)
        remaining_rows = np.arange(len(users))
        try:
            search_request = _SearchRequest(
                users, k, exclusions, self._select_columns(allowed), top_lists, report_progress, self._room_bytes()
            )
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            self._give_up(error)
        else:
            # Half-precision bounds cannot certify every list: the last attempt uses torch's operators.
            attempts = [(fetch_margin, self._fused) for fetch_margin in _FETCH_MARGINS]
            attempts += [(_FETCH_MARGINS[-1], None)] * (self._fused is not None)
            for attempt_index, ((k_divisor, extra_candidates), kernels) in enumerate(attempts):
                if len(remaining_rows) and not self.has_failed:
                    attempt = replace(search_request, fused=kernels, is_estimating=attempt_index == 0)
                    remaining_rows = self._search_slabs(attempt, remaining_rows, k + k // k_divisor + extra_candidates)
        if len(remaining_rows):
            processor_scorer = self._cpu_scorer if self.has_failed else self._exhaustive_scorer
            processor_lists = processor_scorer.top(
                users[remaining_rows],
                k,
                exclusions.select_rows(remaining_rows),
                allowed=allowed,
                threads=threads,
                progress=report_progress,
            )
            top_lists[0][remaining_rows], top_lists[1][remaining_rows] = processor_lists
        return top_lists

    @cached_property
    def _exhaustive_scorer(self) -> Scorer:
        """Scorer for lists that no number of candidates makes certain: too few to rearrange the items for them."""
        return Scorer.of(self._comparable_items.vectors, self._comparable_items.metric, engine=False)

    @cached_property
    def _cpu_scorer(self) -> Scorer:
        return Scorer.of(self._comparable_items.vectors, self._comparable_items.metric)

    def _select_columns(self, allowed: NDArray[np.bool_] | None) -> Columns:
        if allowed is None or self.has_failed:
            return self._items.all_columns
        columns = self._items.columns_of_allowed(torch.from_numpy(allowed).to(self._device))
        _synchronize(self._device)
        return columns

    def _search_slabs(
        self, search_request: _SearchRequest, user_rows: NDArray[np.int64], candidates_per_user: int
    ) -> NDArray[np.int64]:
        """Search for some users; return the users whose lists are not certain."""
        slab_users = self._choose_shape(search_request, candidates_per_user).user_count
        slabs = [user_rows[first_row : first_row + slab_users] for first_row in range(0, len(user_rows), slab_users)]
        with ThreadPoolExecutor(SLABS_UNDER_WAY if self._stream else 1, "device") as pool:
            return np.concatenate([*pool.map(partial(self._search_slab, search_request, candidates_per_user), slabs)])

    def _search_slab(
        self, search_request: _SearchRequest, candidates_per_user: int, user_rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Search for users, in smaller pieces if the device runs out of memory; return the uncertain rows."""
        row_pieces, uncertain_parts = [user_rows], []
        while row_pieces:
            piece_rows = row_pieces.pop()
            if self.has_failed:
                uncertain_parts.append(piece_rows)
                continue
            shape = self._choose_shape(search_request, candidates_per_user)
            if len(piece_rows) > shape.user_count:
                row_pieces += np.array_split(piece_rows, -(-len(piece_rows) // shape.user_count))
                continue
            kernels = self._usable_kernels(search_request, candidates_per_user)
            try:
                uncertain_rows = self._search(search_request, shape, piece_rows)
            except LarderError:
                raise
            except Exception as error:  # Triton's compiler and its cache may raise any exception
                if is_full(error):
                    self._shrink(search_request, shape, error)
                elif self.has_failed or is_of_device(error):
                    self._give_up(error)
                elif kernels is not None:
                    self._leave_kernels(error)
                else:
                    raise
                row_pieces.append(piece_rows)
                continue
            uncertain_parts.append(uncertain_rows)
            search_request.on_progress(len(piece_rows) - len(uncertain_rows))
        return np.sort(np.concatenate(uncertain_parts))  # pieces are taken in reverse order

    def _search(
        self, search_request: _SearchRequest, shape: SearchShape, user_rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        row_selection = slice_if_consecutive(user_rows)
        user_vectors = np.ascontiguousarray(search_request.user_vectors[row_selection])
        compared_users = unit_rows(user_vectors) if self._comparable_items.metric == "cosine" else user_vectors
        with torch.cuda.stream(self._load_stream):
            queries = self._items.encode_queries(user_vectors, compared_users)
            excluded_pairs = self._items.exclusion_pairs(search_request.exclusions, row_selection)
            loaded_event = None if self._load_stream is None else self._load_stream.record_event()
        with self._launch_lock, torch.cuda.stream(self._stream):
            if self._stream is not None and loaded_event is not None:
                self._stream.wait_event(loaded_event)
                for tensor in (*queries.all_tensors(), *excluded_pairs):
                    tensor.record_stream(self._stream)
            kernels = self._usable_kernels(search_request, shape.candidates_per_user)
            keys, is_certain_on_device = (kernels.search if kernels else search)(
                self._items, search_request.columns, queries, excluded_pairs, search_request.k, shape
            )
            host_tensors, copied_event = self._copy_to_host(
                (*unpack_keys(keys), is_certain_on_device, queries.unscaled_lengths)
            )
        if copied_event is not None:
            copied_event.synchronize()
        ordinals, scores, is_certain, user_lengths = (host_tensor.numpy() for host_tensor in host_tensors)
        if not np.isfinite(user_lengths).all():
            check_arguments(self._comparable_items, search_request.user_vectors, search_request.k, None, None)
        # Lists that are not certain are overwritten later by the next attempt.
        search_request.top_lists[0][row_selection], search_request.top_lists[1][row_selection] = (
            ordinals.view(np.uint32),
            scores,
        )
        has_safe_length = (user_lengths == 0) | ((user_lengths > _SAFE_LENGTHS[0]) & (user_lengths < _SAFE_LENGTHS[1]))
        uncertain_rows: NDArray[np.int64] = user_rows[
            ~(is_certain & has_safe_length & lengths_fit_mask(self._comparable_items, user_lengths))
        ]
        return uncertain_rows

    def _copy_to_host(self, tensors: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Start copying tensors to the host; return them with the event of their arrival."""
        if self._stream is None or self._copy_stream is None:
            return [copy_to_host(tensor) for tensor in tensors], None
        self._copy_stream.wait_stream(self._stream)
        with torch.cuda.stream(self._copy_stream):
            host_tensors = [copy_to_host(tensor) for tensor in tensors]
            for tensor in tensors:
                tensor.record_stream(self._copy_stream)
            return host_tensors, self._copy_stream.record_event()

    def _room_bytes(self) -> int:
        """Return the bytes of one slab, bounded by free memory and this process's share of the memory."""
        if self._device.type != "cuda":
            return _PROCESSOR_BYTES
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        used_bytes = torch.cuda.memory_allocated(self._device)
        cached_bytes = torch.cuda.memory_reserved(self._device) - used_bytes
        allowance_bytes = total_bytes * torch.cuda.get_per_process_memory_fraction(self._device) - used_bytes
        return max(0, int(min(free_bytes + cached_bytes, allowance_bytes) * _MEMORY_FRACTION))

    def _choose_shape(self, search_request: _SearchRequest, candidates_per_user: int) -> SearchShape:
        """Return the widest shape for which there is memory, with as many users as fill the device."""
        room_bytes = search_request.room_bytes // self._part_count
        kernels = self._usable_kernels(search_request, candidates_per_user)
        shape: SearchShape = (kernels.shape_of if kernels else shape_of)(
            self._items, search_request.columns, candidates_per_user, room_bytes
        )
        return replace(shape, is_estimating=search_request.is_estimating)

    def _usable_kernels(self, search_request: _SearchRequest, candidates_per_user: int) -> ModuleType | None:
        kernels = search_request.fused and self._fused
        return (
            kernels
            if kernels and kernels.supports_search(self._items, search_request.columns, candidates_per_user)
            else None
        )

    def _shrink(self, search_request: _SearchRequest, shape: SearchShape, error: Exception) -> None:
        """Halve the size of pieces from now on; give up if it cannot be halved."""
        is_narrowest = (
            self._usable_kernels(search_request, shape.candidates_per_user)
            or shape.column_count <= search_request.columns.block_column_count
        )
        if shape.user_count == 1 and is_narrowest:
            self._give_up(error)
            return
        with self._change_lock:
            if (
                self._choose_shape(search_request, shape.candidates_per_user) == shape
            ):  # else another slab has already halved it
                self._part_count *= 2
                _log.info("%s: out of memory with %s; continuing with half of it", self._device, shape)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _leave_kernels(self, error: Exception) -> None:
        """Stop using the kernels: variants compiled after the self-test may fail."""
        with self._change_lock:
            if self._fused is not None:
                self._fused = None
                _log.warning("%s: kernels failed, torch's operators are used from now on: %r", self._device, error)

    def _give_up(self, error: Exception) -> None:
        with self._change_lock:
            if not self.has_failed:
                self.has_failed = True
                _log.warning("%s failed, the processor is used from now on: %s", self._device, error)


def _synchronize(device: torch.device) -> None:
    """Wait for the current stream of this thread."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def probe_kernels(dims: int, device: torch.device, use_kernels: bool | None) -> ModuleType | None:
    """Return `precompute.device.fused` if it works on this device; else None, with the reason in the log.

    By default (`use_kernels` None) kernels run on GPUs only: elsewhere Triton only has its interpreter. Raises
    torch.OutOfMemoryError and torch.AcceleratorError.
    """
    if not (device.type == "cuda" if use_kernels is None else use_kernels):
        return None
    try:
        from precompute.device import fused, hopper

        if dims > fused.WIDTH_MAX:
            reason = f"the kernels take vectors of up to {fused.WIDTH_MAX} numbers, these have {dims}"
        else:
            with torch.cuda.device(device if device.type == "cuda" else -1):  # Triton uses the current device
                if fused.agrees_with_torch(dims, device):
                    return fused
                if hopper.disable(device) and fused.agrees_with_torch(dims, device):
                    _log.warning(
                        "%s: the CUDA kernels' lists differ from the operators': using Triton's kernels", device
                    )
                    return fused
            reason = "its kernels' lists differ from the operators'"
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # the compiler, the driver or a missing package may raise any exception
        reason = f"its kernels cannot be run ({type(error).__name__}: {error})"
    _log.warning("%s scores by torch's operators, several times slower: %s", device, reason)
    return None
