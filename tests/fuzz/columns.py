"""Fuzz target of the compiled columns: each function against its twin in Python.

Where both give a value, it has to be the same. Where the documents of the twin name an error, both have to raise it
(`IS_SAME_REFUSAL`). Where only what is compiled gives a value, it is compared with what its docstring says.
"""

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import xxhash

from cache.native import pure
from cache.native.loader import NUMERAL_DROPPED_BITS, Numerals
from cache.records import Layout
from tests.fuzz.given import FuzzInput

REFUSED = "refused"
_ERRORS = (ValueError, TypeError, OverflowError, IndexError, MemoryError, BufferError)
_numerals = Numerals()


class Different(AssertionError):
    """The compiled function and its twin gave different results."""


def plain_value(value: Any) -> Any:
    """Return a value with buffers as bytes."""
    if isinstance(value, tuple):
        return tuple(plain_value(part) for part in value)
    if isinstance(value, (list, int, str, bool)) or value is None:
        return value
    return bytes(value)


def result(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value of a call, or REFUSED."""
    try:
        return plain_value(function(*arguments))
    except _ERRORS:
        return REFUSED


def compare(name: str, compiled: Any, twin: Any, *arguments: Any, is_same_refusal: bool = False) -> None:
    """Fail if both calls give different values or, with `is_same_refusal`, if only one raises."""
    mine, pure_result = result(compiled, *arguments), result(twin, *arguments)
    if mine != pure_result and (is_same_refusal or REFUSED not in (mine, pure_result)):
        raise Different(f"{name}{arguments}: compiled {mine!r}, pure {pure_result!r}")


def expect(name: str, actual: Any, expected: Any) -> None:
    """Fail unless a value is the one that the docstring says."""
    if actual != expected:
        raise Different(f"{name}: compiled {actual!r}, by its docstring {expected!r}")


def hashes(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    seed = fuzz_input.number(0, 2**64 - 1)
    ids = fuzz_input.texts(40, 160)
    if (mine := result(columns.hashes, ids, seed)) is not None:
        expect("hashes", mine, bytes(pure.hashes(ids, seed)))
    else:
        expect("hashes", any(len(name) > 128 for name in ids), True)


def cuts_of(fuzz_input: FuzzInput, size: int) -> Any:
    """Draw int32 cuts, usually sorted, in bytes that may be unaligned or incomplete."""
    count = fuzz_input.number(0, 12)
    cuts = fuzz_input.array("<i4", count)
    if fuzz_input.number(0, 3):
        cuts = np.sort(np.abs(cuts.astype(np.int64)) % (size + 1)).astype("<i4")
    return bytes(cuts.tobytes() + fuzz_input.text(3))


def rising(cuts: bytes, size: int) -> list[int] | None:
    """Return the cuts if they rise within a size."""
    numbers: list[int] = np.frombuffer(cuts[: len(cuts) // 4 * 4], "<i4").tolist()
    if not numbers or numbers[0] < 0 or numbers[-1] > size or any(a > b for a, b in pairwise(numbers)):
        return None
    return numbers


def text_hashes(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    seed, data = fuzz_input.number(0, 2**64 - 1), fuzz_input.text(400)
    cuts = cuts_of(fuzz_input, len(data))
    numbers = rising(cuts, len(data))
    expected_hashes = None
    if numbers is not None and all(b - a <= 128 for a, b in pairwise(numbers)):
        texts = [data[a:b] for a, b in pairwise(numbers)]
        expected_hashes = b"".join(xxhash.xxh3_64_intdigest(t, seed).to_bytes(8, "little") for t in texts)
    expect("text_hashes", result(columns.text_hashes, data, cuts, seed), expected_hashes)


def is_text(data: bytes) -> bool:
    """Return whether the bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def cut_texts(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    data = fuzz_input.text(200)
    cuts = cuts_of(fuzz_input, len(data))
    numbers = rising(cuts, len(data))
    texts = None if numbers is None else [data[a:b] for a, b in pairwise(numbers)]
    expected_texts = texts if texts is not None and all(map(is_text, texts)) else None
    expect("cut_texts", result(columns.cut_texts, data, cuts), expected_texts)


def joined(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    texts: list[Any] = list(fuzz_input.texts(20, 40))
    if fuzz_input.number(0, 7) == 0:
        texts.append(fuzz_input.number(0, 9))
    expected_join = None
    if all(isinstance(text, bytes) for text in texts):
        cuts = np.cumsum([0, *map(len, texts)]).astype("<i4").tobytes()
        expected_join = (cuts, b"".join(texts))
    expect("joined", result(columns.joined, texts), expected_join)


def replies(fuzz_input: FuzzInput, count: int, length: int) -> bytes:
    """Draw bulk strings of one length, damaged or not."""
    data = b"".join(b"$%d\r\n%b\r\n" % (length, fuzz_input.raw(length).ljust(length, b"x")) for _ in range(count))
    data = data[: len(data) - fuzz_input.number(0, 9)] if fuzz_input.is_true() else data
    if fuzz_input.is_true() and data:
        at = fuzz_input.number(0, len(data) - 1)
        data = data[:at] + fuzz_input.raw(1) + data[at + 1 :]
    return data


def could_be(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    length, reply_count, requested_count = (fuzz_input.number(0, 40), fuzz_input.number(0, 6), fuzz_input.number(0, 8))
    data = replies(fuzz_input, reply_count, length) if fuzz_input.number(0, 3) else fuzz_input.text(200)
    compare("could_be", columns.could_be, pure.could_be, data, requested_count, length, is_same_refusal=True)
    result(columns.could_be, data, fuzz_input.delicate(), fuzz_input.delicate())


def records_of(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    count = fuzz_input.number(0, 6)
    prints = fuzz_input.array("<u8", count).tobytes()
    size, step, first = (fuzz_input.number(14, 40), fuzz_input.number(14, 60), fuzz_input.number(0, 20))
    record_format, is_odd = fuzz_input.number(0, 15), fuzz_input.number(0, 7) == 0
    if is_odd:
        size, step, first, count = (fuzz_input.delicate() for _ in range(4))
    arguments = (fuzz_input.remaining_bytes(), first, step, count, size, prints, record_format)
    if is_odd:  # numpy itself ends the process for some of them
        result(columns.records_of, *arguments)
    else:
        compare("records_of", columns.records_of, pure.records_of, *arguments)


def spread(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    count, size = fuzz_input.number(0, 12), fuzz_input.number(1, 20)
    positions = [
        fuzz_input.number(0, 13) - 1 if fuzz_input.number(0, 7) == 0 else fuzz_input.number(0, 11)
        for _ in range(fuzz_input.number(0, 8))
    ]
    rows = fuzz_input.raw(len(positions) * size).ljust(len(positions) * size, b"\1")
    row_by_position = {
        fuzz_input.number(0, 11): fuzz_input.raw(size).ljust(size, b"\2") for _ in range(fuzz_input.number(0, 4))
    }
    if fuzz_input.number(0, 15) == 0:
        count, size = fuzz_input.delicate(), fuzz_input.delicate()
    if count * max(size, 0) > 2**63 - 1:
        expect("spread", result(columns.spread, count, size, rows, positions, row_by_position), REFUSED)
    if count * max(size, 0) > 1 << 20:
        return  # there is memory for it, and it only takes long
    # Skip negative positions: NumPy counts them from the end, and no caller passes them.
    if all(0 <= position < count for position in [*positions, *row_by_position]):
        compare("spread", columns.spread, pure.spread, count, size, rows, positions, row_by_position)
    elif result(columns.spread, count, size, rows, positions, row_by_position) != REFUSED:
        raise Different(f"spread takes a place outside: {count} {positions} {row_by_position}")


def flights(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    mine = dict.fromkeys(fuzz_input.raw(fuzz_input.number(0, 9)), 0)
    pure_flights = dict(mine)
    for _ in range(fuzz_input.number(1, 4)):
        keys = list(fuzz_input.raw(fuzz_input.number(0, 9)))
        if fuzz_input.is_true():
            expect("board", columns.board(mine, keys, 1), pure.board(pure_flights, keys, 1))
        else:
            columns.leave(mine, keys)
            pure.leave(pure_flights, keys)
        expect("flights", (mine, list(mine)), (pure_flights, list(pure_flights)))


def are_ids(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    ids: list[Any] = list(fuzz_input.texts(10, 20))
    if fuzz_input.number(0, 7) == 0:
        ids.append("text")
    compare("are_ids", columns.are_ids, pure.are_ids, ids, fuzz_input.number(0, 25), is_same_refusal=True)


def getranges(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    prefix, count = fuzz_input.text(30), fuzz_input.number(0, 6)
    pages, offsets = (np.array([fuzz_input.delicate() for _ in range(count)], np.int64) for _ in range(2))
    length = fuzz_input.delicate()
    mine = result(columns.getranges, prefix, pages, offsets, length)
    is_sound = length > 0 and all(
        page >= 0 and 0 <= offset <= 2**63 - 1 - length
        for page, offset in zip(pages.tolist(), offsets.tolist(), strict=True)
    )
    expected_commands = pure.getranges(prefix, pages, offsets, length) if is_sound else REFUSED
    expect(f"getranges({prefix!r}, {pages}, {offsets}, {length})", mine, expected_commands)


def dots(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    dims, rows = fuzz_input.number(1, 70), fuzz_input.number(0, 12)
    vector, matrix = fuzz_input.array("<f4", dims), fuzz_input.array("<f4", dims * rows)
    is_odd = fuzz_input.number(0, 3) == 0
    ordinals = np.array(
        [
            fuzz_input.delicate() if is_odd else fuzz_input.number(0, max(0, rows - 1))
            for _ in range(fuzz_input.number(0, 9))
        ],
        np.int64,
    )
    mine = result(columns.dots, vector, matrix, ordinals)
    with np.errstate(all="ignore"):
        pure_result = result(pure.dots, vector, matrix, ordinals)
        expect("dots refuses", mine == REFUSED, pure_result == REFUSED)
        finite = np.concatenate([vector, matrix]).astype(np.float64)
        if mine == REFUSED or not (np.abs(finite) < 1e15).all():
            return
        query, selected_rows = (vector.astype(np.float64), matrix.reshape(rows, dims).astype(np.float64)[ordinals])
        bound = dims * 2.0**-22 * (np.abs(selected_rows) @ np.abs(query)) + 1e-30
        close = np.abs(np.frombuffer(mine, np.float32) - selected_rows @ query) <= bound
    expect(f"dots({vector}, {matrix}, {ordinals})", close.all(), True)


def records(fuzz_input: FuzzInput, *, is_list: bool) -> tuple[bytes, int, bool, int]:
    """Draw (records, width, whether numbers are float16, count); sometimes with one byte too many."""
    width, is_half, count = fuzz_input.number(1, 20), fuzz_input.is_true(), fuzz_input.number(0, 5)
    layout = Layout("topk" if is_list else "value", width, "f2" if is_half else "f4")
    rows = np.zeros(count, layout.dtype)
    for row in rows:
        row["count"] = fuzz_input.number(0, width + 1)
        row["flags"], row["exponent"] = fuzz_input.number(0, 255), fuzz_input.number(-128, 127)
        numbers = fuzz_input.array("<f2" if is_half else "<f4", width)
        row["numbers"] = numbers if fuzz_input.number(0, 3) == 0 else np.nan_to_num(numbers, posinf=1, neginf=-1)
        if is_list:
            row["items"] = (
                fuzz_input.array("<u4", width) if fuzz_input.number(0, 7) == 0 else fuzz_input.array("u1", width) % 12
            )
    data = rows.tobytes() + (fuzz_input.text(3) if fuzz_input.number(0, 15) == 0 else b"")
    return data, width, is_half, count


def plain_masks(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    is_list = fuzz_input.is_true()
    data, width, is_half, _ = records(fuzz_input, is_list=is_list)
    arguments = (
        fuzz_input.number(0, 255), fuzz_input.number(0, 255), fuzz_input.number(0, 25), fuzz_input.number(-128, 127),
        fuzz_input.number(0, 15) if fuzz_input.is_true() else fuzz_input.number(0, 2**32 - 1),
    )  # fmt: skip
    with np.errstate(all="ignore"):
        compare(
            "plain_record_mask", columns.plain_record_mask, pure.plain_record_mask, data, width, is_list, is_half,
            *arguments, is_same_refusal=True
        )  # fmt: skip
    result(columns.plain_record_mask, data, fuzz_input.delicate(), is_list, is_half, *arguments)


def are_finite(data: bytes, width: int, is_half: bool, *, is_list: bool) -> bool:
    """Return whether all numbers of all records are finite."""
    layout = Layout("topk" if is_list else "value", width, "f2" if is_half else "f4")
    if len(data) % layout.dtype.itemsize:
        return False
    return bool(np.isfinite(np.frombuffer(data, layout.dtype)["numbers"]).all())


def numbers(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    is_list = fuzz_input.is_true()
    data, width, is_half, _ = records(fuzz_input, is_list=is_list)
    k = fuzz_input.number(1, width)
    if are_finite(data, width, is_half, is_list=is_list):
        with np.errstate(all="ignore"):
            compare(
                "numbers", columns.numbers, pure.numbers, data, width, is_list, is_half, k, is_same_refusal=True
            )  # fmt: skip
    result(columns.numbers, data, width, is_list, is_half, fuzz_input.delicate())


def catalogue(fuzz_input: FuzzInput) -> tuple[bytes, Any]:
    """Draw the ids of a catalogue: their bytes, and uint64 offsets, usually valid."""
    texts = fuzz_input.texts(12, 12)
    offsets = np.cumsum([0, *map(len, texts)]).astype("<u8")
    if fuzz_input.number(0, 7) == 0 and len(offsets):
        offsets[fuzz_input.number(0, len(offsets) - 1)] = fuzz_input.delicate() & (2**64 - 1)
    return b"".join(texts), offsets[: len(offsets) - (fuzz_input.number(0, 15) == 0)]


def names(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    data, width, is_half, count = records(fuzz_input, is_list=True)
    ids, offsets = catalogue(fuzz_input)
    k = fuzz_input.number(1, width)
    mine = result(columns.names, data, width, is_half, k, ids, offsets)
    with np.errstate(all="ignore"):
        pure_result = result(pure.names, data, width, is_half, k, ids, offsets)
    if mine != pure_result and REFUSED not in (mine, pure_result):
        raise Different(f"names({data!r}, {width}, {is_half}, {k}, {ids!r}, {offsets}): {mine!r}, {pure_result!r}")
    if count and mine != REFUSED and pure_result == REFUSED:
        raise Different(f"names({data!r}, {width}, {is_half}, {k}, {ids!r}, {offsets}): {mine!r} is taken")


def answers(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    data, width, is_half, count = records(fuzz_input, is_list=True)
    ids, offsets = catalogue(fuzz_input)
    k = fuzz_input.number(1, width)
    head, middle, after, last = (fuzz_input.text(6) for _ in range(4))
    people, ends = ([fuzz_input.text(9) for _ in range(count)] for _ in range(2))
    if fuzz_input.number(0, 15) == 0:
        people = people[:-1]
    arguments = (data, width, is_half, k, ids, offsets, _numerals.text_rows, head, people, middle, after, last, ends)
    mine = result(columns.answers, *arguments)
    is_finite = are_finite(data, width, is_half, is_list=True)
    if isinstance(mine, tuple) and is_finite:
        with np.errstate(all="ignore"):
            keys = [key for key in mine if np.isfinite(_number_of(key))]
            if keys:
                _numerals.write(keys)
        mine = result(columns.answers, *arguments)
    if not isinstance(mine, list) or not is_finite:
        return
    layout = Layout("topk", width, "f2" if is_half else "f4")
    rows = np.frombuffer(data, layout.dtype)
    with np.errstate(all="ignore"):
        scores = np.frombuffer(pure.numbers(data, width, True, is_half, k), np.float32).reshape(-1, k)
    for text, row, name, end, list_scores in zip(mine, rows, people, ends, scores, strict=True):
        bounds = offsets.tolist()
        items = b",".join(b'"%b"' % ids[bounds[o] : bounds[o + 1]] for o in row["items"][:k].tolist())
        scores_json = orjson.dumps(list_scores, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        expect("answers", text, b"".join((head, name, middle, items, after, scores_json, last, end)))


def _number_of(key: int) -> np.float32:
    number: np.float32 = np.uint32(key << NUMERAL_DROPPED_BITS).view(np.float32)
    return number


def stream(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    prefix, metadata, after = fuzz_input.text(12), fuzz_input.text(90), fuzz_input.text(12)
    room = len(metadata) + 8
    is_odd = fuzz_input.number(0, 7) == 0
    body_at, rows_at, nodes_at, buffers_at = (
        fuzz_input.delicate() if is_odd else fuzz_input.number(0, room) for _ in range(4)
    )
    rows = fuzz_input.delicate()
    nodes = [fuzz_input.delicate() for _ in range(fuzz_input.number(0, 4))]
    buffers = fuzz_input.texts(4, 20)
    mine = result(
        columns.stream, prefix, metadata, body_at, rows_at, nodes_at, buffers_at, rows, nodes, buffers, after
    )  # fmt: skip
    expected_stream: Any = REFUSED
    padded = [data + b"\0" * (-len(data) % 8) for data in buffers]
    numbers_at = [(body_at, sum(map(len, padded))), (rows_at, rows)]
    numbers_at += [(nodes_at + 8 * i, node) for i, node in enumerate(nodes)]
    start = 0
    for i, (data, full) in enumerate(zip(buffers, padded, strict=True)):
        numbers_at += [(buffers_at + 16 * i, start), (buffers_at + 16 * i + 8, len(data))]
        start += len(full)
    size = len(metadata)
    if all(0 <= at <= size - 8 for at, _ in numbers_at) and all(0 <= at <= size for at in (nodes_at, buffers_at)):
        head = bytearray(metadata)
        for at, number in numbers_at:
            head[at : at + 8] = number.to_bytes(8, "little", signed=True)
        expected_stream = prefix + bytes(head) + b"".join(padded) + after
    expect("stream", mine, expected_stream)


def scanner(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    bounds = (
        (fuzz_input.number(0, 40), fuzz_input.number(0, 60))
        if fuzz_input.number(0, 7)
        else (fuzz_input.delicate(), fuzz_input.delicate())
    )
    try:
        pure_scanner = pure.ReplyScanner(*bounds)
    except ValueError:
        expect("ReplyScanner", result(columns.ReplyScanner, *bounds), REFUSED)
        return
    mine = columns.ReplyScanner(*bounds)
    while data := fuzz_input.text(40):
        expect(f"admits {data!r}", mine.admits(data), pure_scanner.admits(data))


def parts(columns: ModuleType, fuzz_input: FuzzInput) -> None:
    count = fuzz_input.number(1, 5)
    is_odd = fuzz_input.number(0, 7) == 0
    values = np.unique(
        fuzz_input.array("<u8", fuzz_input.number(0, 24))
        % (fuzz_input.number(1, 200) if fuzz_input.is_true() else 2**64 - 1)
    )
    ends = sorted(fuzz_input.number(0, len(values)) for _ in range(count - 1))
    pieces = [values[a:b].copy() for a, b in pairwise([0, *ends, len(values)])]
    firsts = [int(piece[0]) if len(piece) else (int(values[end]) if end < len(values) else 2**64 - 1)
              for piece, end in zip(pieces, [0, *ends], strict=True)]  # fmt: skip
    if is_odd:
        firsts = [fuzz_input.number(0, 2**64 - 1) for _ in range(fuzz_input.number(0, 6))]
    arguments = (tuple(firsts), tuple(pieces))
    try:
        mine = columns.HashParts(*arguments)
    except _ERRORS:
        return
    queried_hashes = np.concatenate(
        [
            fuzz_input.array("<u8", fuzz_input.number(0, 8)),
            values[: fuzz_input.number(0, 24)],
            fuzz_input.array("u1", 9),
        ]
    )
    queried_hashes = queried_hashes.astype("<u8")
    compiled_positions = result(mine.find, queried_hashes)
    positions = np.array(
        [
            fuzz_input.delicate() if fuzz_input.number(0, 7) == 0 else fuzz_input.number(0, 30)
            for _ in range(fuzz_input.number(0, 9))
        ],
        np.int64,
    )
    pages = np.array([fuzz_input.delicate() for _ in range(len(pieces))], np.int64)
    per_page, size = fuzz_input.delicate(), fuzz_input.delicate()
    if is_odd:
        result(mine.locate, positions, pages, per_page, size)
        return
    pure_parts = pure.HashParts(*arguments)
    expect("find", compiled_positions, result(pure_parts.find, queried_hashes))
    if per_page > 0 and size > 0 and (pages >= 0).all():
        with np.errstate(all="ignore"):
            compare(
                "locate", mine.locate, pure_parts.locate, positions, pages, per_page, size, is_same_refusal=True
            )  # fmt: skip
    else:
        result(mine.locate, positions, pages, per_page, size)


TARGETS = (
    hashes, text_hashes, cut_texts, joined, could_be, records_of, spread, flights, are_ids, getranges, dots,
    plain_masks,
    numbers, names, answers, stream, scanner, parts,
)  # fmt: skip


def target(columns: ModuleType) -> Callable[[bytes], None]:
    """Run one function of the extension, which the first byte of the fuzzer's input selects."""

    def call(data: bytes) -> None:
        fuzz_input = FuzzInput(data)
        TARGETS[fuzz_input.number(0, len(TARGETS) - 1)](columns, fuzz_input)

    return call
