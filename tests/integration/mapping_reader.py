"""A process that opens artefacts as a worker does, reads every byte of them, and waits: folder, items, dims."""

import json
import os
import sys
from pathlib import Path

import numpy as np

from cache.format.directory import Directory, map_file
from cache.format.manifest import Artefact, DirectoryPart, EntitySet
from cache.model.candidate_search import Searcher
from tests.integration.mapped import private_kb

HASHES = "hashes.bin"
VECTORS = "vectors.bin"
INDEX = "index.faiss"


def main(folder: Path, items: int, dims: int) -> None:
    """Print private kB before and after."""
    file = Artefact(HASHES, (folder / HASHES).stat().st_size, "")
    count = file.size_bytes // 8
    entities = EntitySet("user", 0, count, (DirectoryPart(0, count, file),))
    query = np.ones((1, dims), np.float32)
    private_before_kb = private_kb(os.getpid())
    directory = Directory.open(folder, entities)
    vectors = map_file(folder / VECTORS, "<f4", (items, dims))
    searcher = Searcher.open(folder / INDEX, "inner_product", expected_vector_count=items)
    total = int(directory.hash_parts[0].max()) + float(vectors.max())
    ordinals = searcher.search(query, 10)
    print(json.dumps([private_before_kb, private_kb(os.getpid()), total > 0 and len(ordinals) == 1]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
