"""Identity: bytes of ids, their hashes and fingerprints, and the digest of an input. Pure."""

import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.errors import InvalidId, InvalidInput
from cache.native import loader, pure

ID_BYTES_MAX = 256
HASH_SPACE = 1 << 64
"""Number of possible hashes and of possible fingerprints."""
FINGERPRINT_SEED = 0x9E3779B97F4A7C15
"""Hash seed independent of every directory seed: a record proves whose it is even if the directory is wrong."""

_TYPE_TAGS = {"str": b"s", "int": b"i", "float": b"f", "bool": b"b", "vector": b"v", "texts": b"t"}

FeatureValue = str | int | float | bool | tuple[float, ...] | tuple[str, ...]


def canonical_id(value: object) -> bytes:
    """Bytes of an id: UTF-8 of a string, decimal form of an integer; raises InvalidId for all else."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, int) and not isinstance(value, bool):
        text = str(value)
    else:
        raise InvalidId(
            f"an id is a string or an integer, not {type(value).__name__}",
            kind=type(value).__name__,
        )
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidId("an id must be valid Unicode (it holds a lone surrogate)") from error
    if not 1 <= len(raw) <= ID_BYTES_MAX:
        raise InvalidId(
            f"an id has 1 to {ID_BYTES_MAX} bytes of UTF-8, this one has {len(raw)}",
            size_bytes=len(raw),
        )
    return raw


def hash_id(raw: bytes, seed: int) -> int:
    """64-bit xxh3 of an id: its place in a directory."""
    return xxhash.xxh3_64_intdigest(raw, seed)


def hash_ids(raws: Sequence[bytes], seed: int) -> NDArray[np.uint64]:
    """uint64[n] of `hash_id`."""
    raw_ids = raws if type(raws) is list else list(raws)
    hash_bytes = loader.kernels.hashes(raw_ids, seed)
    if hash_bytes is None:  # longer than what is compiled takes
        hash_bytes = pure.hashes(raw_ids, seed)
    return np.frombuffer(hash_bytes, np.uint64)


def are_ids(raws: list[bytes]) -> bool:
    """True if every one has a length that an id may have (1 to 256 bytes)."""
    return loader.kernels.are_ids(raws, ID_BYTES_MAX)


def fingerprint(raw: bytes) -> int:
    """64-bit identity stored inside a record, from a seed of its own."""
    return xxhash.xxh3_64_intdigest(raw, FINGERPRINT_SEED)


def fingerprints(raws: Sequence[bytes]) -> NDArray[np.uint64]:
    """uint64[n] of `fingerprint`."""
    return hash_ids(raws, FINGERPRINT_SEED)


def input_digest(
    model_digest: str,
    history: Sequence[bytes] | None,
    features: Mapping[str, FeatureValue] | None,
) -> bytes:
    """16 bytes that differ whenever the model, the history or any feature differs.

    Every part is typed and length-prefixed, so no two inputs share an encoding: 1, 1.0, True and "1" are four
    values, an empty history is not a missing one. Raises InvalidInput for NaN and infinities; -0.0 is 0.0.
    """
    digest = xxhash.xxh3_128(_sized(model_digest.encode()))
    if history is None:
        digest.update(b"h-")
    else:
        digest.update(b"h" + struct.pack("<I", len(history)))
        for raw in history:
            digest.update(_sized(raw))
    if features is None:
        digest.update(b"f-")
    else:
        digest.update(b"f" + struct.pack("<I", len(features)))
        for name in sorted(features):
            digest.update(_sized(name.encode()) + _encode_feature(name, features[name]))
    return digest.digest()


def _sized(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def _encode_feature(name: str, value: FeatureValue) -> bytes:
    match value:
        case bool():
            return _TYPE_TAGS["bool"] + bytes([value])
        case int():
            return _TYPE_TAGS["int"] + _sized(str(value).encode())
        case float():
            return _TYPE_TAGS["float"] + _finite(name, value)
        case str():
            return _TYPE_TAGS["str"] + _sized(value.encode())
        case (str(), *_):
            return _TYPE_TAGS["texts"] + _all_texts(name, value)
        case tuple():
            return _TYPE_TAGS["vector"] + _sized(_all_finite(name, value))
    raise InvalidInput(
        f"feature {name!r} has the unsupported type {type(value).__name__}", field=name
    )


def _finite(name: str, value: float) -> bytes:
    if not math.isfinite(value):
        raise InvalidInput(f"feature {name!r} is {value}, which is not a finite number", field=name)
    return struct.pack("<d", value + 0.0)  # -0.0 + 0.0 is 0.0


def _all_texts(name: str, value: Sequence[object]) -> bytes:
    if not all(isinstance(part, str) for part in value):
        raise InvalidInput(f"feature {name!r} holds texts beside other values", field=name)
    return struct.pack("<I", len(value)) + b"".join(_sized(str(part).encode()) for part in value)


def _all_finite(name: str, value: Sequence[object]) -> bytes:
    if not all(isinstance(part, int | float) for part in value):
        raise InvalidInput(f"feature {name!r} holds numbers beside other values", field=name)
    numbers = [part + 0.0 for part in value]  # type: ignore[operator]  # as above
    if not all(map(math.isfinite, numbers)):
        _finite(name, next(number for number in numbers if not math.isfinite(number)))
    return struct.pack(f"<{len(numbers)}d", *numbers)
