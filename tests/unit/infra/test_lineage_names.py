"""Names of datasets in OpenLineage's form, without passwords, wildcards or generations."""

import pytest

from infra.lineage.step_datasets import DatasetName


@pytest.mark.parametrize(
    ("url", "parts", "expected"),
    [
        ("s3://recs/larder", ("generations", "tables"), ("s3://recs", "larder/generations/tables")),
        ("s3://recs", ("events",), ("s3://recs", "events")),
        ("gs://recs/a/", (), ("gs://recs", "a")),
        ("s3://key:secret@recs/a", (), None),
        ("abfs://one@acc/a", ("b",), ("abfs://one@acc", "a/b")),
        ("abfss://two@acc.example", (), ("abfss://two@acc.example", "/")),
        ("abfs://one:secret@acc/a", (), None),
        ("https://h/a.parquet?sig=secret", (), ("https://h", "a.parquet")),
        ("/data/artifacts", ("events",), ("file", "/data/artifacts/events")),
        ("file:///data/artifacts", (), ("file", "/data/artifacts")),
    ],
)
def test_a_url_is_a_system_and_a_name_in_it(url: str, parts: tuple[str, ...], expected: tuple[str, str] | None) -> None:
    dataset_name = DatasetName.of_url(url, *parts)

    assert "secret" not in f"{dataset_name.namespace} {dataset_name.name}"
    assert expected is None or (dataset_name.namespace, dataset_name.name) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("clicks.csv", ("file", "/base/clicks.csv")),
        ("clicks/*.parquet", ("file", "/base/clicks")),
        ("clicks/2026-1[12]/part?.csv", ("file", "/base/clicks")),
        ("s3://clicks/2026-*/*.parquet", ("s3://clicks", "/")),
        ("s3://clicks/logs/*.parquet", ("s3://clicks", "logs")),
        ("s3://clicks/d?y=1/a.csv", ("s3://clicks", "/")),
        ("https://h/a.parquet?sig=a*b/c", ("https://h", "a.parquet")),
        ("https://h/logs/*.csv?sig=a", ("https://h", "logs")),
        ("/absolute/a.csv", ("file", "/absolute/a.csv")),
    ],
)
def test_a_pattern_is_the_folder_above_its_first_wildcard(pattern: str, expected: tuple[str, str]) -> None:
    dataset_name = DatasetName.of_pattern(pattern, "/base")

    assert (dataset_name.namespace, dataset_name.name) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:secret@cache:6380/2", ("redis://cache:6380", "2/key")),
        ("rediss://cache", ("redis://cache:6379", "0/key")),
        ("redis://", ("redis://localhost:6379", "0/key")),
        ("redis://cache?db=3", ("redis://cache:6379", "3/key")),
        ("redis://cache/2?db=3", ("redis://cache:6379", "3/key")),
        ("unix:///run/redis.sock", ("redis:///run/redis.sock", "0/key")),
        ("unix:///run/redis.sock?db=1", ("redis:///run/redis.sock", "1/key")),
        ("redis+sentinel://h1/main", ("redis://h1:26379/main", "0/key")),
        ("redis+sentinel://u:secret@h1:26380,h2:26379/main/1", ("redis://h1:26380/main", "1/key")),
        ("redis+cluster://u:secret@h1:7000,h2:7001", ("redis://h1:7000", "0/key")),
        ("rediss+cluster://h1", ("redis://h1:6379", "0/key")),
    ],
)
def test_a_key_stands_behind_its_database(url: str, expected: tuple[str, str]) -> None:
    dataset_name = DatasetName.of_redis(url, "key")

    assert (dataset_name.namespace, dataset_name.name) == expected
