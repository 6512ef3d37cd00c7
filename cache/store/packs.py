"""Packs: copies of many write-once files in one, so that reading a long history asks the store for few.

The files themselves stay where they are and stay the truth: whatever a pack lacks, or a pack that cannot be read, costs
requests and nothing else.
"""

import contextlib
import hashlib
import re
from collections.abc import Collection, Mapping

import orjson

from cache.errors import LarderError
from cache.store.artefacts import ArtefactStore

PACK_FILES = 100
"""Number of files outside any pack at which whoever has read them all packs them."""

_PACK = re.compile(r"pack-[0-9a-f]{16}\.json")


def read_files(
    store: ArtefactStore,
    folder: str,
    listed_names: Collection[str],
    requested_names: Collection[str],
) -> tuple[dict[str, bytes], set[str]]:
    """Contents of `requested_names` write-once files by name, those that are there; and which of them no pack holds.

    `listed_names`: all names in the folder. Two rounds of requests at most, however many files.
    """
    content_by_name: dict[str, bytes] = {}
    if requested_names:
        packs = [f"{folder}/{name}" for name in sorted(listed_names) if _PACK.fullmatch(name)]
        for raw in store.read_many(packs).values():
            with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
                text_by_name: dict[str, str] = orjson.loads(raw)
                content_by_name |= {
                    name: text_by_name[name].encode()
                    for name in text_by_name.keys() & set(requested_names)
                }
    loose = [name for name in requested_names if name not in content_by_name]
    read = store.read_many([f"{folder}/{name}" for name in loose])
    content_by_name |= {
        name: read[f"{folder}/{name}"] for name in loose if f"{folder}/{name}" in read
    }
    return content_by_name, {name for name in loose if name in content_by_name}


def pack(store: ArtefactStore, folder: str, files: Mapping[str, bytes]) -> None:
    """Write these files as one pack once they are many and were read without fault; a failure is ignored."""
    if len(files) < PACK_FILES:
        return
    body = orjson.dumps({name: raw.decode() for name, raw in sorted(files.items())})
    with contextlib.suppress(LarderError):
        store.write_once(f"{folder}/pack-{hashlib.sha256(body).hexdigest()[:16]}.json", body)
