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
"""Hash seed that differs from every directory seed: a record's fingerprint identifies its entity even if the directory
is wrong."""

_TAG_BY_TYPE = {"str": b"s", "int": b"i", "float": b"f", "bool": b"b", "vector": b"v", "texts": b"t"}

FeatureValue = str | int | float | bool | tuple[float, ...] | tuple[str, ...]


def canonical_id(raw_id: object) -> bytes:
    """Return the bytes of an id: UTF-8 of a string, decimal form of an integer; raise InvalidId for anything else."""
    if isinstance(raw_id, str):
        id_text = raw_id
    elif isinstance(raw_id, int) and not isinstance(raw_id, bool):
        id_text = str(raw_id)
    else:
        raise InvalidId(f"an id is a string or an integer, not {type(raw_id).__name__}", kind=type(raw_id).__name__)
    try:
        id_bytes = id_text.encode()
    except UnicodeEncodeError as error:
        raise InvalidId("an id must be valid Unicode (it holds a lone surrogate)") from error
    if not 1 <= len(id_bytes) <= ID_BYTES_MAX:
        raise InvalidId(
            f"an id must have 1 to {ID_BYTES_MAX} bytes of UTF-8, this one has {len(id_bytes)}",
            size_bytes=len(id_bytes),
        )
    return id_bytes


def hash_id(id_bytes: bytes, hash_seed: int) -> int:
    """Return the 64-bit xxh3 of an id, by which a directory finds it."""
    return xxhash.xxh3_64_intdigest(id_bytes, hash_seed)


def hash_ids(ids: Sequence[bytes], hash_seed: int) -> NDArray[np.uint64]:
    """Return `hash_id` of each id, uint64[n]."""
    id_list = ids if type(ids) is list else list(ids)
    hash_bytes = loader.kernels.hashes(id_list, hash_seed)
    if hash_bytes is None:  # longer than the compiled function supports
        hash_bytes = pure.hashes(id_list, hash_seed)
    return np.frombuffer(hash_bytes, np.uint64)


def have_allowed_lengths(ids: list[bytes]) -> bool:
    """Return whether every id has an allowed length (1 to 256 bytes)."""
    return loader.kernels.are_ids(ids, ID_BYTES_MAX)


def fingerprint(id_bytes: bytes) -> int:
    """Return the 64-bit identity stored inside a record, from a separate seed."""
    return xxhash.xxh3_64_intdigest(id_bytes, FINGERPRINT_SEED)


def fingerprints(ids: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return `fingerprint` of each id, uint64[n]."""
    return hash_ids(ids, FINGERPRINT_SEED)


def input_digest(
    model_digest: str, history: Sequence[bytes] | None, features: Mapping[str, FeatureValue] | None
) -> bytes:
    """Return 16 bytes that differ whenever the model, the history or any feature differs.

    Every part is typed and length-prefixed, so that different inputs have different encodings: 1, 1.0, True and "1" are
    four values, and an empty history differs from a missing one. -0.0 counts as 0.0. Raises InvalidInput for NaN and
    infinities.
    """
    hasher = xxhash.xxh3_128(_length_prefixed(model_digest.encode()))
    if history is None:
        hasher.update(b"h-")
    else:
        hasher.update(b"h" + struct.pack("<I", len(history)))
        for item_id in history:
            hasher.update(_length_prefixed(item_id))
    if features is None:
        hasher.update(b"f-")
    else:
        hasher.update(b"f" + struct.pack("<I", len(features)))
        for name in sorted(features):
            hasher.update(_length_prefixed(name.encode()) + _encode_feature(name, features[name]))
    return hasher.digest()


def _length_prefixed(encoded_part: bytes) -> bytes:
    return struct.pack("<I", len(encoded_part)) + encoded_part


def _encode_feature(feature_name: str, feature_value: FeatureValue) -> bytes:
    match feature_value:
        case bool():
            return _TAG_BY_TYPE["bool"] + bytes([feature_value])
        case int():
            return _TAG_BY_TYPE["int"] + _length_prefixed(str(feature_value).encode())
        case float():
            return _TAG_BY_TYPE["float"] + _encode_finite(feature_name, feature_value)
        case str():
            return _TAG_BY_TYPE["str"] + _length_prefixed(feature_value.encode())
        case (str(), *_):
            return _TAG_BY_TYPE["texts"] + _encode_texts(feature_name, feature_value)
        case tuple():
            return _TAG_BY_TYPE["vector"] + _length_prefixed(_encode_finite_numbers(feature_name, feature_value))
    raise InvalidInput(
        f"feature {feature_name!r} has the unsupported type {type(feature_value).__name__}", field=feature_name
    )


def _encode_finite(feature_name: str, feature_number: float) -> bytes:
    if not math.isfinite(feature_number):
        raise InvalidInput(
            f"feature {feature_name!r} is {feature_number}, which is not a finite number", field=feature_name
        )
    return struct.pack("<d", feature_number + 0.0)  # -0.0 + 0.0 is 0.0


def _encode_texts(feature_name: str, feature_texts: Sequence[object]) -> bytes:
    if not all(isinstance(element, str) for element in feature_texts):
        raise InvalidInput(f"feature {feature_name!r} mixes texts with other values", field=feature_name)
    return struct.pack("<I", len(feature_texts)) + b"".join(
        _length_prefixed(str(element).encode()) for element in feature_texts
    )


def _encode_finite_numbers(feature_name: str, feature_numbers: Sequence[object]) -> bytes:
    if not all(isinstance(element, int | float) for element in feature_numbers):
        raise InvalidInput(f"feature {feature_name!r} mixes numbers with other values", field=feature_name)
    numbers = [element + 0.0 for element in feature_numbers]  # type: ignore[operator]  # as above
    if not all(map(math.isfinite, numbers)):
        _encode_finite(feature_name, next(number for number in numbers if not math.isfinite(number)))
    return struct.pack(f"<{len(numbers)}d", *numbers)
