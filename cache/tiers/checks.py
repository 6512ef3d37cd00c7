"""Checks of what a tier holds: whether it is a record of the wanted entity, of this input, and still alive. Pure."""

from cache.format.records.codec import unpack_overlay
from cache.format.records.layout import RECORD_FORMAT, is_live, peek_fingerprint, peek_format
from cache.l2.commands import Overlay
from cache.tiers.l1 import Entry, LocalKey
from cache.tiers.results import MISS_BY_REASON, Hit, Miss, MissReason, ReadResult, RecordKey, Tier


def judge(entry: Entry, record_key: RecordKey, tier: Tier) -> ReadResult:
    """The outcome of what a tier holds for this want: found, corrupt, or from another input."""
    if entry.fingerprint != record_key.fingerprint:
        return MISS_BY_REASON[MissReason.CORRUPT]
    # Whoever sent nothing may have what is stored; whoever sent something gets an answer to that.
    if (
        entry.digest is not None
        and record_key.digest is not None
        and entry.digest != record_key.digest
    ):
        return MISS_BY_REASON[MissReason.INPUT_CHANGED]
    return Hit(entry.record, tier, entry.digest is not None, entry.expires_at)


def overlay_entry(record_key: RecordKey, overlay: Overlay, asked_at: float) -> Entry | Miss:
    """The entry in an overlay asked for at `asked_at` (monotonic), or why it is a miss."""
    unpacked = unpack_overlay(record_key.table.layout, overlay.payload)
    if unpacked is None or peek_format(unpacked[0]) != RECORD_FORMAT:
        return MISS_BY_REASON[MissReason.CORRUPT]
    if overlay.ttl_s <= 0:
        return MISS_BY_REASON[MissReason.EXPIRED]
    record, digest = unpacked
    if peek_fingerprint(record) != record_key.fingerprint:
        return MISS_BY_REASON[MissReason.CORRUPT]
    return Entry(record, record_key.fingerprint, digest, asked_at + overlay.ttl_s)


def is_answer(record_key: RecordKey, overlay: Overlay, asked_at: float) -> bool:
    """True if an overlay asked for at `asked_at` (monotonic) holds an answer to this very input."""
    entry = overlay_entry(record_key, overlay, asked_at)
    return isinstance(entry, Entry) and isinstance(judge(entry, record_key, "l2"), Hit)


def live_key(key: LocalKey, digest: bytes) -> LocalKey:
    """Key in L1 of a live answer to this input, which is kept beside the record of the night."""
    raw = key.key if isinstance(key.key, bytes) else key.key.to_bytes(8, "little")
    return key._replace(key=raw + digest)


def check_live(record_key: RecordKey, record: bytes) -> None:
    """Raises ValueError for anything but a whole live record of the wanted entity."""
    size_bytes = record_key.table.layout.size_bytes
    if len(record) != size_bytes:
        raise ValueError(
            f"a record of {record_key.table.name} has {size_bytes} bytes, not {len(record)}"
        )
    if peek_fingerprint(record) != record_key.fingerprint or not is_live(record):
        raise ValueError(f"not a live record of the wanted entity in {record_key.table.name}")
