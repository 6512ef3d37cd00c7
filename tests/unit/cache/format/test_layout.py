"""One description of a record: dtype, offsets and every reader of bytes by position follow it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache import records as layout
from cache.records import (
    FLAG_LIVE,
    HEADER_BYTES,
    HEADER_FIELDS,
    OFFSET_BY_FIELD,
    RECORD_FORMAT,
    Layout,
    absent_records,
    are_answers_of,
    encode_numbers,
    is_answer_of,
    is_live,
    peek_fingerprint,
    peek_format,
    unpack_header,
)

ROOT = Path(__file__).parents[4]
LAYOUTS = [
    Layout("topk", 3, "f2"),
    Layout("topk", 3, "f4"),
    Layout("vector", 3, "f2"),
    Layout("vector", 3, "f4"),
    Layout("vector", 3, "i1"),
    Layout("value", 3, "f4"),
]
BY_NUMBER = re.compile(r"\b(record|answer)\w*\[(\d\d|:\d|\d+:)|\bFLAGS_AT\b *=|>> 4\b|FORMAT << 4")


@pytest.mark.parametrize("record_layout", LAYOUTS)
def test_the_dtype_has_the_fields_where_the_description_has_them(record_layout: Layout) -> None:
    fields: Any = record_layout.dtype.fields

    assert {field.name: fields[field.name] for field in HEADER_FIELDS} == {
        field.name: (np.dtype(field.dtype), field.byte_offset) for field in HEADER_FIELDS
    }
    payload = [at for name, (_, at) in fields.items() if name not in OFFSET_BY_FIELD]
    assert min(payload) == OFFSET_BY_FIELD["payload"] == HEADER_BYTES
    assert record_layout.dtype.itemsize == record_layout.size_bytes and not record_layout.dtype.isalignedstruct


def test_a_header_is_unpacked_as_numpy_reads_it() -> None:
    record = encode_numbers(
        Layout("value", 1, "f2"), np.array([2**64 - 1], np.uint64), np.ones((1, 1), "f4"), 2**32 - 1
    )[0]

    assert unpack_header(record.tobytes()) == tuple(record[field.name] for field in HEADER_FIELDS)


def test_what_peeks_at_bytes_sees_what_the_fields_say() -> None:
    record_layout, prints = Layout("value", 2, "f4"), np.array([3, 2**63], np.uint64)
    numbers = np.ones((2, 2), np.float32)
    live = encode_numbers(record_layout, prints, numbers, 1, flags=FLAG_LIVE)
    records = np.concatenate(
        [encode_numbers(record_layout, prints, numbers, 1), live, absent_records(record_layout, prints, 1)]
    )
    prints = np.tile(prints, 3)
    for fingerprints in (prints, prints + np.uint64(1)):
        answer_flags = [
            is_answer_of(record.tobytes(), int(fingerprint))
            for record, fingerprint in zip(records, fingerprints, strict=True)
        ]
        assert answer_flags == are_answers_of(records, fingerprints).tolist()
    assert are_answers_of(records, prints).tolist() == [True] * 4 + [False] * 2
    assert [peek_fingerprint(record.tobytes()) for record in records] == prints.tolist()
    assert [peek_format(record.tobytes()) for record in records] == [RECORD_FORMAT] * 4 + [15] * 2
    assert [is_live(record.tobytes()) for record in records] == [False] * 2 + [True] * 2 + [False] * 2


def test_only_the_layout_module_has_offsets_within_a_record() -> None:
    """Offsets stood in five files; now `layout` has them, and the C sources a copy that is compared."""
    offences = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for top in ("cache", "serving", "precompute")
        for file in (ROOT / top).rglob("*.py")
        if file != Path(layout.__file__)
        for line in file.read_text().splitlines()
        if BY_NUMBER.search(line)
    ]

    assert offences == []


PROGRAM = """
import json, sys

from cache.formats import FORMATS

if sys.argv[1] in FORMATS:
    FORMATS[sys.argv[1]] = FORMATS[sys.argv[1]]._replace(written_version=2, newest_readable_version=2)
import numpy as np
from cache.format.redis_keys import Keyspace
from cache.format.manifest import MANIFEST_FORMAT, Manifest
from cache.records import decode_record, encode_numbers
from cache.records import Layout, peek_format

layout = Layout("value", 1, "f4")
record = encode_numbers(layout, np.ones(1, "u8"), np.ones((1, 1), "f4"), 1)[0].tobytes()
manifest = Manifest("shop", "g", 1, 2, "b", "i", {}, {}, {}, {}, {}, None, ())
assert decode_record(layout, record).fingerprint == 1
print(json.dumps([peek_format(record), json.loads(manifest.to_bytes())["format"], Keyspace("shop").live]))
"""


@pytest.mark.parametrize(
    ("changed_format", "expected"),
    [
        ("NONE", [1, 1, "larder:1:{shop}:live"]),
        ("record", [2, 1, "larder:1:{shop}:live"]),
        ("manifest", [1, 2, "larder:1:{shop}:live"]),
        ("Redis keys", [1, 1, "larder:2:{shop}:live"]),
    ],
)
def test_every_version_changes_alone(changed_format: str, expected: list[object]) -> None:
    """It was one number: a new format of records would have moved the pointer, and old replicas seen it vanish."""
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, changed_format], cwd=ROOT, check=True, capture_output=True
    ).stdout

    assert json.loads(output) == expected
