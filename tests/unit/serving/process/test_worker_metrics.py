import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics.exposition import WorkerPeers, merge_expositions


def exposed(count: int, odd: str = "b") -> bytes:
    registry = CollectorRegistry()
    Counter("larder_a", "With labels", ["x"], registry=registry).labels(odd).inc(count)
    Gauge("larder_ready", "Without", registry=registry).set(1)
    Histogram("larder_s", "Buckets", buckets=(1, 2), registry=registry).observe(count)
    return generate_latest(registry)


def test_each_family_stands_once_with_the_series_of_every_worker() -> None:
    text = merge_expositions({"0": exposed(2), "1": exposed(3, 'a "b" {c} d')}).decode()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    totals = {
        (sample.labels["worker"], sample.labels["x"]): sample.value
        for sample in families["larder_a"].samples
        if sample.name == "larder_a_total"
    }
    assert totals == {("0", "b"): 2, ("1", 'a "b" {c} d'): 3}
    assert {sample.labels["worker"] for sample in families["larder_ready"].samples} == {"0", "1"}
    assert sum(sample.name == "larder_s_bucket" for sample in families["larder_s"].samples) == 6
    assert text.count("# TYPE larder_a_total ") == 1


async def test_whoever_is_asked_tells_the_counts_of_all_that_answer(tmp_path: Path) -> None:
    peers = [WorkerPeers(tmp_path, slot) for slot in range(3)]
    for slot, peer in enumerate(peers):
        await peer.open(lambda slot=slot: exposed(slot))  # type: ignore[misc]
    await peers[1].aclose()
    (tmp_path / "7.sock").touch()  # left by one that was killed

    text = (await peers[0].exposition()).decode()

    (family,) = [e for e in text_string_to_metric_families(text) if e.name == "larder_ready"]
    assert [sample.labels["worker"] for sample in family.samples] == ["0", "2"]
    for peer in peers:
        await peer.aclose()


async def test_a_peer_that_hangs_or_tells_half_a_line_is_left_out(tmp_path: Path) -> None:
    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(exposed(1))  # and never ends

    async def break_off(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(exposed(1)[:-5])
        writer.close()

    servers = [
        await asyncio.start_unix_server(handler, tmp_path / f"{slot}.sock")
        for slot, handler in ((1, hang), (2, break_off))
    ]
    peers = WorkerPeers(tmp_path, 0)
    await peers.open(lambda: exposed(5))

    text = await peers.exposition()

    assert b'worker="0"' in text and b'worker="1"' not in text and b'worker="2"' not in text
    await peers.aclose()
    for server in servers:
        server.close()
