"""Redis slow, flapping, silent or gone, the model slow or gone, or both: every request gets a marked answer in time."""

from pathlib import Path

import numpy as np

from cache.process.redis_server import RedisServer
from tests.integration.nights import DATA_UNTIL, histories, prepare, publish_night, top_lists
from tests.integration.ordeal import DEADLINE_MS, TROUBLES, AnswerJudge, Trouble, ordeal

SEED = 77
REQUESTS = 300
SECONDS = 1.5
"""In each trouble, at least."""


async def test_no_trouble_costs_a_request_its_answer_or_its_mark(tmp_path: Path, own_redis: RedisServer) -> None:
    config = prepare(tmp_path / "night", own_redis.url, seed=SEED, users=300)
    live = publish_night(config, DATA_UNTIL)
    users = sorted(histories(config))
    items = sorted({item for history in histories(config).values() for item in history})
    answer_judge = AnswerJudge({live: top_lists(config, live, users)}, users, items, np.random.default_rng(SEED))
    async with ordeal(config, tmp_path, answer_judge) as service:
        late = []
        for trouble in TROUBLES:
            sources_before = dict(answer_judge.sources)
            print(await service.endure(trouble, requests=REQUESTS, seconds=SECONDS))
            fresh = {name for name in answer_judge.sources if answer_judge.sources[name] > sources_before.get(name, 0)}

            if trouble == Trouble("slow"):  # slower than usual, and still well within a read's time
                assert "l2" in fresh
            if trouble.model == "broken":
                assert "live" not in fresh
            if trouble.redis == "gone":
                assert "l2" not in fresh and await service.stale()
            if service.p99_ms > 3 * DEADLINE_MS + service.lateness_ms:
                late.append(trouble)
            assert await service.recovered()

        counts = await service.counts()
        assert answer_judge.wrong == []
        assert answer_judge.requests > REQUESTS * len(TROUBLES)
        assert {"l1", "l2", "live", "default"} <= set(answer_judge.sources)
        assert counts.disagreements(answer_judge.sources, answer_judge.entities) == []
        assert late == []
