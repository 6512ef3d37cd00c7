"""What a generation's files occupy on a host: once, however many workers there are."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import faiss
import httpx
import numpy as np
import pytest

from tests.integration.mapped import mapped, private_kb
from tests.integration.mapping_reader import HASHES, INDEX, VECTORS
from tests.integration.nights import build_night, histories
from tests.integration.program import ROOT, environment, started
from tests.polling import poll_until

ITEMS, DIMS, USERS = 100_000, 64, 3_000_000
FILES_KB = (ITEMS * DIMS * 4 * 2 + USERS * 8) // 1024

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not count shared pages"
)


def test_a_second_process_shares_directory_vectors_and_index(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.random((ITEMS, DIMS), np.float32)
    np.sort(rng.integers(0, 2**63, USERS, np.uint64)).tofile(tmp_path / HASHES)
    vectors.tofile(tmp_path / VECTORS)
    index = faiss.IndexFlatIP(DIMS)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / INDEX))
    command = [sys.executable, "-m", "tests.integration.mapping_reader", str(tmp_path)]
    with ExitStack() as stack:
        readers = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(ITEMS), str(DIMS)], cwd=ROOT, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )
            for _ in range(2)
        ]  # fmt: skip
        reader_reports = [json.loads(reader.stdout.readline()) for reader in readers if reader.stdout is not None]
        files = [mapped(reader.pid, tmp_path) for reader in readers]
        privates = [private_kb(reader.pid) for reader in readers]
        for reader in readers:
            reader.communicate("", timeout=30)

    for usage_by_file in files:
        assert set(usage_by_file) == {HASHES, VECTORS, INDEX}
        for usage in usage_by_file.values():
            assert usage["Rss"] >= 0.95 * usage["Size"]  # all of it was read
            assert usage["Pss"] <= 0.52 * usage["Rss"]
    for (kb_before, _, is_right), after in zip(reader_reports, privates, strict=True):
        assert is_right and after - kb_before <= 0.1 * FILES_KB


def test_workers_keep_no_copy_of_what_they_map(tmp_path: Path, redis_url: str) -> None:
    night = build_night(tmp_path / "night", redis_url, users=400, items=120)
    # Judge every answer, so that both workers open the sample of inputs.
    more = {"REDIS_URL": redis_url, "LARDER_WORKERS": "2", "LARDER_QUALITY_PER_MILLE": "1000"}
    history_by_user = histories(night)
    live_entities = [{"id": f"new-{user}", "history": history_by_user[user]} for user in sorted(history_by_user)[:50]]
    artefacts = night.path(night.artifacts)
    with started(environment(night, tmp_path / "state", **more)) as (process, url):
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        first, second = map(int, Path(children).read_text().split())

        def are_shared() -> bool:
            """After one more request each on many connections: whoever answers has read what is needed."""
            for user in sorted(history_by_user)[:20]:
                httpx.get(f"{url}/v1/lookup/user_topk/{user}").raise_for_status()
                httpx.post(f"{url}/v1/lookup/user_topk", json={"entities": live_entities})
            first_usage_by_file, theirs = mapped(first, artefacts), mapped(second, artefacts)
            return set(first_usage_by_file) == set(theirs) and all(
                usage["Private_Clean"] + usage["Private_Dirty"] == 0 and usage["Pss"] * 2 <= usage["Rss"]
                for usage in (*first_usage_by_file.values(), *theirs.values())
            )

        assert poll_until(are_shared, 60)
        files = mapped(first, artefacts)
    kinds = {Path(name).suffix for name in files}
    assert ".faiss" in kinds and any("directory/" in name for name in files), sorted(files)
    assert any("items/" in name for name in files)
