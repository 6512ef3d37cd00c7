"""What is compiled gives what numpy gives, whatever it is asked, and refuses what reaches beyond its buffers."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError
from cache.format.directory import Directory
from cache.format.ids import hash_ids, have_allowed_lengths
from cache.format.redis_keys import Keyspace
from cache.l2.commands import Frames, Packer, PageReads, frame_stride_bytes
from cache.native import loader, pure
from cache.records import RECORD_FORMAT, Layout, encode_numbers
from cache.tiers import tiered
from cache.tiers.singleflight import board_absent_keys, leave_keys
from cache.tiers.tiered import FlightRecords
from tests.fakes import Night

COLUMNS: Any = loader.load_kernels({})
pytestmark = pytest.mark.skipif(COLUMNS is pure, reason="cache.native._columns was not built")
IDS = st.lists(st.binary(max_size=300), max_size=20)
LAYOUT = Layout("vector", 2, "f4")
HOSTILE = st.one_of(
    st.binary(max_size=64),
    st.integers(-(2**65), 2**65),
    st.sampled_from([0, 1, 2, 3, 8, 16, 100, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -1]),
    st.booleans(),
    st.lists(st.binary(max_size=8) | st.integers(-2, 9), max_size=3),
    st.dictionaries(st.integers(-2, 3), st.binary(max_size=20), max_size=2),
    st.none(),
)


@pytest.fixture(autouse=True, scope="module")
def switched_on() -> Iterator[None]:
    with patch.object(loader, "kernels", COLUMNS):
        yield


@contextmanager
def interpreted() -> Iterator[None]:
    with patch.object(loader, "kernels", pure):
        yield


@settings(deadline=None)
@given(ids=IDS, seed=st.integers(0, 2**64 - 1))
@example(ids=[b"x" * size for size in range(200)], seed=2**64 - 1)
def test_ids_have_the_hashes_of_the_library(ids: list[bytes], seed: int) -> None:
    assert hash_ids(ids, seed).tolist() == [xxhash.xxh3_64_intdigest(raw, seed) for raw in ids]
    data, cuts = b"".join(ids), np.cumsum([0, *map(len, ids)]).astype(np.int32)
    texts = COLUMNS.text_hashes(data, cuts, seed)
    if any(len(raw) > 128 for raw in ids):
        assert texts is None
    else:
        assert texts is not None
        assert np.frombuffer(texts, np.uint64).tolist() == hash_ids(ids, seed).tolist()
    with interpreted():
        assert have_allowed_lengths(ids) == all(0 < len(raw) <= 256 for raw in ids)
    assert have_allowed_lengths(ids) == all(0 < len(raw) <= 256 for raw in ids)


@pytest.mark.parametrize("cuts", [[0, 3, 2], [-1, 2], [0, 4], [0, 9, 3], [], [2, 1, 3]])
def test_cuts_that_do_not_fit_the_texts_are_not_followed(cuts: list[int]) -> None:
    assert COLUMNS.text_hashes(b"abc", np.array(cuts, np.int32), 0) is None


@settings(deadline=None)
@given(data=st.data(), shards=st.integers(1, 5))
def test_a_directory_finds_and_places_the_same(data: st.DataObject, shards: int) -> None:
    number = st.integers(0, 2**64 - 1) | st.integers(0, 40)
    hashes = np.unique(np.array(data.draw(st.lists(number, max_size=300)), np.uint64))
    queried_hashes = np.array(data.draw(st.lists(number, max_size=300)), np.uint64)
    queried_hashes = np.concatenate([queried_hashes, hashes[::2]])
    firsts = [shard * (2**64 // shards) for shard in range(shards)]
    cuts = [*hashes.searchsorted(np.array(firsts, np.uint64)).tolist(), len(hashes)]
    parts = [hashes[cuts[at] : cuts[at + 1]] for at in range(shards)]
    compiled_directory = Directory(0, firsts, parts)
    with interpreted():
        theirs = Directory(0, firsts, parts)

    positions = compiled_directory.find_positions(queried_hashes)

    assert positions.tolist() == theirs.find_positions(queried_hashes).tolist()
    positions = positions[positions >= 0]
    first_pages = np.arange(shards, dtype=np.int64) * 1_000
    for compiled_array, interpreted_array in zip(
        compiled_directory.page_locations(positions, first_pages, 7, 12),
        theirs.page_locations(positions, first_pages, 7, 12),
        strict=True,
    ):
        assert compiled_array.tolist() == interpreted_array.tolist()
    beyond = np.array([len(hashes)], np.int64)
    with pytest.raises(ValueError, match="no part has"):
        compiled_directory.page_locations(beyond, first_pages, 7, 12)


@given(
    reads=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=8), length=st.integers(1, 2**20)
)
def test_commands_are_packed_alike(reads: list[tuple[int, int]], length: int) -> None:
    page_reads = PageReads("g", "t", [a for a, _ in reads], [b for _, b in reads], length)

    packed = Packer(Keyspace("shop")).pack_page_reads(page_reads)

    with interpreted():
        assert packed == Packer(Keyspace("shop")).pack_page_reads(page_reads)
    assert packed == Packer(Keyspace("shop")).pack(list(page_reads))[0]


@given(data=st.data(), length=st.integers(0, 12), count=st.integers(0, 5))
def test_replies_are_judged_alike_wherever_they_end_and_whatever_is_wrong(
    data: st.DataObject, length: int, count: int
) -> None:
    reply_stream = bytearray(b"".join(b"$%d\r\n%b\r\n" % (length, b"x" * length) for _ in range(count + 1)))
    for _ in range(data.draw(st.integers(0, 2))):
        reply_stream[data.draw(st.integers(0, len(reply_stream) - 1))] = data.draw(st.integers(0, 255))
    came = bytes(reply_stream[: data.draw(st.integers(0, len(reply_stream)))])

    judged = loader.kernels.could_be(came, count, length)

    with interpreted():
        assert judged == loader.kernels.could_be(came, count, length)


RESP = st.lists(
    st.sampled_from(
        [
            b"*3\r\n", b"%2\r\n", b"|1\r\n", b">7\r\n", b"$4\r\n", b"=4\r\n", b"$99\r\n", b"$-1\r\n", b"*0009\r\n",
            b"*99999999999999999999\r\n", b"~+1\r\n", b"+a\rb\r\n", b":1\r\n", b"\r\n", b"\r", b"\n", b"*", b"1",
        ]
    ),
    max_size=12,
).map(b"".join)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(RESP | st.binary(max_size=4) | st.just(b"*" + b"0" * 62), max_size=8),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 50)),
)
def test_replies_are_admitted_alike_wherever_they_are_cut(pieces: list[bytes], bounds: tuple[int, int]) -> None:
    compiled_scanner, theirs = COLUMNS.ReplyScanner(*bounds), pure.ReplyScanner(*bounds)

    assert [compiled_scanner.admits(piece) for piece in pieces] == [theirs.admits(piece) for piece in pieces]


@settings(deadline=None)
@given(count=st.integers(1, 6), wrong=st.none() | st.integers(0, 5), at=st.integers(0, 23), first=st.integers(0, 2))
def test_records_are_copied_when_all_are_sound(count: int, wrong: int | None, at: int, first: int) -> None:
    prints = np.arange(count + first, dtype=np.uint64) + np.uint64(2**63)
    records = encode_numbers(LAYOUT, prints, np.ones((count + first, 2), np.float32), 1)
    if wrong is not None:
        raw = records.view(np.uint8).reshape(count + first, -1)
        raw[wrong % count + first, at] ^= 0x40
    payloads = b"".join(b"$24\r\n%b\r\n" % record.tobytes() for record in records)
    frames = Frames(payloads, count + first, 24).select_range(first, count)

    sound = frames.checked_records(LAYOUT.dtype, prints[first:], RECORD_FORMAT)

    is_detected = wrong is not None and (at < 8 or at == 14)
    assert (sound is None) == is_detected
    if sound is not None:
        assert sound.tobytes() == frames.to_records(LAYOUT.dtype).tobytes()
        assert sound.flags.writeable and sound.flags.c_contiguous


@given(data=st.data(), count=st.integers(0, 8))
def test_records_of_several_flights_come_to_their_places(data: st.DataObject, count: int) -> None:
    shuffled_indexes = data.draw(st.permutations(range(count)))
    cut, joined_end = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    own_indexes, joined = sorted(shuffled_indexes[:cut]), shuffled_indexes[cut:joined_end]
    night = Night()
    layout = night.table.layout
    records = encode_numbers(layout, np.arange(count, dtype=np.uint64), np.ones((count, layout.width), np.float32), 1)
    record_keys: Any = type("Wants", (), {"table": night.table, "__len__": lambda _: count})()
    landed = FlightRecords(records[own_indexes], {})
    record_by_index = {index: records[index].tobytes() for index in joined}

    spread_records = tiered._spread_rows(record_keys, landed, own_indexes, record_by_index)

    with interpreted():
        assert (
            spread_records.tobytes() == tiered._spread_rows(record_keys, landed, own_indexes, record_by_index).tobytes()
        )
    for index in (*own_indexes, *joined):
        assert spread_records[index].tobytes() == records[index].tobytes()


@given(
    initial_flights=st.dictionaries(st.integers(0, 9), st.just("other"), max_size=5),
    keys=st.lists(st.integers(0, 9), max_size=12),
)
def test_keys_enter_and_leave_alike(initial_flights: dict[int, object], keys: list[int]) -> None:
    compiled_flights, theirs, flight = dict(initial_flights), dict(initial_flights), object()
    joined_indexes = board_absent_keys(compiled_flights, keys, flight)
    with interpreted():
        assert joined_indexes == board_absent_keys(theirs, keys, flight)
        assert compiled_flights == theirs and set(compiled_flights) == {*initial_flights, *keys}
        own_keys = [key for index, key in enumerate(keys) if index not in joined_indexes]
        leave_keys(theirs, own_keys)
    leave_keys(compiled_flights, own_keys)
    leave_keys(compiled_flights, own_keys)  # once more changes nothing

    assert compiled_flights == theirs == initial_flights


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from([*(name for name in dir(COLUMNS) if name[:1].islower()), "find", "locate", "admits"]),
    arguments=st.lists(HOSTILE, min_size=1, max_size=14),
)
def test_nothing_that_is_handed_over_can_break_it(name: str, arguments: list[Any]) -> None:
    parts = COLUMNS.HashParts((0, 5), (bytes(16), bytes(8)))
    methods = {"find": parts, "locate": parts, "admits": COLUMNS.ReplyScanner(9, 9)}
    call = getattr(methods.get(name, COLUMNS), name)

    with_errors(call, *arguments)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_nothing_of_the_right_kind_but_the_wrong_size_can_break_it(data: st.DataObject) -> None:
    """Arguments of the right types, so that every check of a size is reached."""
    raw, number = st.binary(max_size=200), st.integers(-2, 40) | st.integers(-(2**63), 2**63 - 1)
    texts = st.lists(st.binary(max_size=9), max_size=4)
    flag = st.booleans()
    shapes = {
        "records_of": (raw, number, number, number, number, raw, number),
        "could_be": (raw, number, number),
        "spread": (number, number, raw, st.lists(number, max_size=4), st.dictionaries(number, raw)),
        "getranges": (raw, raw, raw, number),
        "cut_texts": (raw, raw),
        "plain_record_mask": (raw, number, flag, flag, number, number, number, number),
        "numbers": (raw, number, flag, flag, number),
        "names": (raw, number, flag, number, raw, raw),
        "answers": (
            raw, number, flag, number, raw, raw, st.just(bytes(8 << 20)), raw, texts, raw, raw,
            raw, texts,
        ),
        "stream": (raw, raw, number, number, number, number, number, st.lists(number), texts, raw),
    }  # fmt: skip
    name = data.draw(st.sampled_from(sorted(shapes)))
    with_errors(getattr(COLUMNS, name), *(data.draw(strategy) for strategy in shapes[name]))
    parts = COLUMNS.HashParts((0, 5), (bytes(16), bytes(8)))
    with_errors(parts.locate, *(data.draw(strategy) for strategy in (raw, raw, number, number)))
    with_errors(COLUMNS.ReplyScanner, data.draw(number), data.draw(number))


def with_errors(call: Any, *arguments: Any) -> None:
    with suppress(ValueError, TypeError, OverflowError, BufferError, MemoryError):
        call(*arguments)


def test_parts_need_as_many_hashes() -> None:
    for firsts, parts in (((0,), ()), ((), ()), ((0,), (1,)), ((-1,), (b"",)), (("a",), (b"",))):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            COLUMNS.HashParts(firsts, parts)


def test_a_catalogue_that_ends_early_is_no_catalogue() -> None:
    record = np.zeros(1, Layout("topk", 2, "f2").dtype)
    for ids, offsets in (
        (b"ab", np.array([0, 1, 9], np.uint64)),
        (b"ab", np.array([0, 2, 1], np.uint64)),
        (b"ab", np.array([0], np.uint64)),
        (b"ab", np.array([2**63, 2**64 - 1], np.uint64)),
    ):
        record["items"] = [[1, 0]] if len(offsets) == 3 else [[0, 0]]
        with pytest.raises(ValueError, match="the catalogue does not have"):
            COLUMNS.names(record, 2, True, 2, ids, offsets)


def test_it_can_be_switched_off_and_other_sources_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert loader.load_kernels({"LARDER_COLUMNS": "off"}) is pure
    with pytest.raises(ConfigError, match="LARDER_COLUMNS must be auto or off, not 'maybe'"):
        loader.load_kernels({"LARDER_COLUMNS": "maybe"})
    monkeypatch.setattr(loader, "FUNCTIONS_VERSION", -1)
    assert loader.load_kernels({}) is pure and "install again" in caplog.text
    assert frame_stride_bytes(3) == 9


@pytest.mark.parametrize("name", ["fingerprint", "flags", "payload", "format_shift", "numeral"])
def test_records_laid_out_otherwise_than_they_are_described_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Offsets in C and in Python could drift apart, and readers take one number for another."""
    compiled = importlib.import_module("cache.native._columns")
    number = compiled.LAYOUT[name]
    monkeypatch.setitem(compiled.LAYOUT, name, number + 1)

    with pytest.raises(ConfigError, match=f"compiled with {name} = {number + 1}, .* has {number}"):
        loader.load_kernels({})


class _IndexThatClears:
    """An object that stands for an integer, and that empties a list when it is asked for its value."""

    def __init__(self, buffers: list[bytes]) -> None:
        self._buffers = buffers

    def __index__(self) -> int:
        self._buffers[:] = [bytes(8) for _ in self._buffers]
        return 1


def test_a_stream_takes_integers_alone_as_numbers_of_nodes() -> None:
    buffers = [bytes(8)]

    with pytest.raises(ValueError, match="integers"):
        COLUMNS.stream(
            b"", bytes(64), 0, 8, 16, 40, 1, [_IndexThatClears(buffers)], buffers, b"",
        )  # fmt: skip


@pytest.mark.parametrize("kernels", [COLUMNS, pure])
@pytest.mark.parametrize("indexes", [[0] * 10, [9] * 10, [1, 0, *range(2, 9), 8]])
def test_records_at_places_named_twice_leave_zeros_elsewhere(kernels: Any, indexes: list[int]) -> None:
    size = 1 << 16  # large enough for memory that was in use before
    rows = b"".join(bytes([index + 1]) * size for index in range(10))
    expected_bytes = bytearray(10 * size)
    for row, index in enumerate(indexes):
        expected_bytes[index * size : (index + 1) * size] = rows[row * size : (row + 1) * size]
    used = bytearray(b"\xff" * len(expected_bytes))
    del used  # its memory is what an allocator hands out next

    spread = bytes(kernels.spread(10, size, rows, indexes, {}))

    assert spread == expected_bytes


@pytest.mark.parametrize("kernels", [COLUMNS, pure])
@pytest.mark.parametrize(("first_page", "per_page", "size"), [(2**63 - 1, 1, 16), (0, 2**62, 2**62), (0, 8, 2**63 - 1)])
def test_a_page_or_an_offset_beyond_64_bits_is_refused(kernels: Any, first_page: int, per_page: int, size: int) -> None:
    parts = kernels.HashParts((0,), (np.arange(4, dtype=np.uint64),))
    positions, first_pages = np.array([3], np.int64), np.array([first_page], np.int64)

    with pytest.raises(ValueError, match="64 bits"):
        parts.locate(positions, first_pages, per_page, size)


@pytest.mark.parametrize("kernels", [COLUMNS, pure])
@pytest.mark.parametrize(
    ("ids", "length_max", "is_fine"),
    [([], 0, True), ([], 9, True), ([b"a"], 0, False), ([b"a", "b"], 9, False), ([b""], 9, False)],
)
def test_ids_are_judged_alike_with_none_of_them_or_none_allowed(
    kernels: Any, ids: list[Any], length_max: int, is_fine: bool
) -> None:
    assert kernels.are_ids(ids, length_max) is is_fine
