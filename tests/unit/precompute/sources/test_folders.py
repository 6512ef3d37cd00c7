"""What of a folder is data: the same files are read on this host and behind a URL, and none of them twice."""

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cache.errors import SourceError
from precompute.config.settings import Sources
from precompute.sources.files import source_files
from precompute.sources.readers import read_interactions

WriteFiles = Callable[[Sequence[str]], str]
"""Puts files of one row each into a folder; returns what stands before a pattern of it."""


@pytest.fixture(params=["local", "memory"])
def write_files(request: pytest.FixtureRequest, tmp_path: Path) -> WriteFiles:
    def local(names: Sequence[str]) -> str:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"user,item\nu,{name}\n")
        return ""

    def memory(names: Sequence[str]) -> str:
        folder = f"/{uuid.uuid4().hex}"
        for name in names:
            MemoryFileSystem().pipe_file(f"{folder}/{name}", f"user,item\nu,{name}\n".encode())
        return f"memory:/{folder}/"

    return local if request.param == "local" else memory


def files_read(base: Path, *patterns: str) -> list[str]:
    """Names of the files that are read, in order: each has its own name as its item."""
    batches = read_interactions(Sources(patterns, format="csv"), base)
    return [item for batch in batches for item in batch.item_ids.row_texts().to_pylist()]


SPARK = (
    "clicks/_SUCCESS",
    "clicks/_temporary/0/_temporary/attempt_1/day=3/part-2.csv",
    "clicks/day=1/.part-0.csv.crc",
    "clicks/day=1/part-0.csv",
    "clicks/_day=2/part-1.csv",
    "clicks/.hidden/part-3.csv",
    "clicks/part-4.csv._COPYING_",
)


@pytest.mark.parametrize("pattern", ["clicks", "clicks/", "clicks/**/*.csv", "clicks/*"])
def test_what_a_job_left_behind_is_no_data_at_any_depth(write_files: WriteFiles, tmp_path: Path, pattern: str) -> None:
    path_prefix = write_files(SPARK)

    read_names = files_read(tmp_path, path_prefix + pattern)

    assert read_names == ["clicks/_day=2/part-1.csv", "clicks/day=1/part-0.csv"]


@pytest.mark.parametrize("note", ["~$clicks.csv", ".~lock.clicks.csv#", "clicks.csv.tmp", "#a.csv#"])
def test_lock_files_and_partial_files_in_a_data_folder_are_left_out(
    write_files: WriteFiles, tmp_path: Path, note: str
) -> None:
    path_prefix = write_files(["clicks/clicks.csv", f"clicks/{note}"])

    assert files_read(tmp_path, f"{path_prefix}clicks/*") == ["clicks/clicks.csv"]
    assert files_read(tmp_path, f"{path_prefix}clicks") == ["clicks/clicks.csv"]


def test_the_settings_beside_the_data_are_left_out(write_files: WriteFiles, tmp_path: Path) -> None:
    path_prefix = write_files(["a.csv", "larder.toml"])

    assert files_read(tmp_path, f"{path_prefix}.".removesuffix("/.") or ".") == ["a.csv"]


def test_what_a_pattern_names_by_itself_is_read_whatever_it_is_called(write_files: WriteFiles, tmp_path: Path) -> None:
    path_prefix = write_files(["_raw/.new/a.csv", "_raw/.new/_b.csv"])

    assert files_read(tmp_path, f"{path_prefix}_raw/.new/*.csv") == ["_raw/.new/a.csv"]
    assert files_read(tmp_path, f"{path_prefix}_raw/.new/_b.csv") == ["_raw/.new/_b.csv"]


def test_a_folder_is_read_with_its_subfolders(write_files: WriteFiles, tmp_path: Path) -> None:
    names = ["clicks/a.csv", "clicks/day=1/b.csv", "clicks/day=1/hour=2/c.csv"]
    path_prefix = write_files(names)

    for pattern in ("clicks", "clicks/**", "clicks/**/*.csv", "clicks/*"):
        assert files_read(tmp_path, path_prefix + pattern) == names
    assert files_read(tmp_path, f"{path_prefix}clicks/day=*") == names[1:]
    assert files_read(tmp_path, f"{path_prefix}clicks/*.csv") == names[:1]


def test_a_file_that_is_named_twice_is_read_once(write_files: WriteFiles, tmp_path: Path) -> None:
    path_prefix = write_files(["clicks/a.csv", "clicks/b.csv"])
    patterns = ["clicks/b.csv", "clicks", "clicks/*.csv", "./clicks/a.csv", "clicks//b.csv"]

    read_names = files_read(tmp_path, *(path_prefix + pattern for pattern in patterns[: 3 if path_prefix else 5]))

    assert read_names == ["clicks/b.csv", "clicks/a.csv"]


def test_a_link_to_a_file_that_is_read_is_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks/a.csv").write_text("user,item\nu,i\n")
    (tmp_path / "clicks/latest.csv").symlink_to("a.csv")
    (tmp_path / "clicks/again").symlink_to(tmp_path / "clicks")

    assert files_read(tmp_path, "clicks", "clicks/latest.csv") == ["i"]


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("lake/clicks/_delta_log/00000000000000000000.json", "a Delta table"),
        ("lake/clicks/metadata/v2.metadata.json", "an Iceberg table"),
        ("lake/clicks/metadata/00001-0b9b3f0e-6c0e-4f8e-9b7e-1c2d3e4f5a6b.metadata.json", "an Iceberg table"),
        ("lake/clicks/.hoodie/hoodie.properties", "a Hudi table"),
        ("lake/clicks/_spark_metadata/0", "the output of a Spark stream"),
    ],
)
@pytest.mark.parametrize(
    "pattern",
    [
        "lake",
        "lake/**/*.csv",
        "lake/*/*/*.csv",
        "lake/clicks",
        "lake/clicks/data",
        "lake/clicks/data/*.csv",
        "lake/clicks/data/a.csv",
    ],
)
def test_a_table_whose_log_says_which_files_count_is_refused_by_its_kind(
    write_files: WriteFiles, tmp_path: Path, log: str, kind: str, pattern: str
) -> None:
    path_prefix = write_files([log, "lake/clicks/data/a.csv", "plain/b.csv"])

    with pytest.raises(SourceError, match=rf"lake/clicks is {kind}: .* Write its rows") as refused:
        source_files((path_prefix + pattern,), tmp_path)

    assert str(refused.value.details["path"]).endswith("lake/clicks")
    assert files_read(tmp_path, f"{path_prefix}plain") == ["plain/b.csv"]


def test_who_may_not_look_above_the_files_may_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket's policy may allow one prefix alone; a link with a signature, one file."""
    folder = f"/{uuid.uuid4().hex}"
    MemoryFileSystem().pipe_file(f"{folder}/clicks/a.csv", b"user,item\nu,i\n")
    exists, original_ls = MemoryFileSystem.exists, MemoryFileSystem.ls

    def denied(call: Callable[..., object]) -> Callable[..., object]:
        def asks(self: MemoryFileSystem, path: str, *arguments: object, **named: object) -> object:
            if not path.startswith(f"{folder}/clicks") or path.endswith(("_log", ".hoodie")):
                raise PermissionError(f"AccessDenied: {path}")
            return call(self, path, *arguments, **named)

        return asks

    monkeypatch.setattr(MemoryFileSystem, "exists", denied(exists))
    monkeypatch.setattr(MemoryFileSystem, "ls", denied(original_ls))

    assert files_read(tmp_path, f"memory:/{folder}/clicks/*.csv") == ["i"]
    assert files_read(tmp_path, f"memory:/{folder}/clicks/a.csv") == ["i"]


def test_a_folder_called_metadata_is_no_table(write_files: WriteFiles, tmp_path: Path) -> None:
    path_prefix = write_files(["clicks/metadata/about.csv", "clicks/a.csv"])

    assert files_read(tmp_path, f"{path_prefix}clicks/*.csv") == ["clicks/a.csv"]


def test_only_notes_are_named_where_nothing_else_matches(write_files: WriteFiles, tmp_path: Path) -> None:
    path_prefix = write_files(["clicks/_SUCCESS", "clicks/~$a.csv"])

    with pytest.raises(
        SourceError, match=r"no source file matches .*only files of other programs match.*_SUCCESS, ~\$a\.csv"
    ):
        source_files((f"{path_prefix}clicks/*",), tmp_path)


@pytest.mark.parametrize("name", ["folder [v1]", "a?b", "[x]"])
def test_folders_and_files_with_brackets_in_their_names_are_read(
    write_files: WriteFiles, tmp_path: Path, name: str
) -> None:
    path_prefix = write_files([f"{name}/a [1].csv", f"{name}/b.csv"])

    assert files_read(tmp_path, f"{path_prefix}{name}/*.csv") == [f"{name}/a [1].csv", f"{name}/b.csv"]
    assert files_read(tmp_path, f"{path_prefix}{name}/a [1].csv") == [f"{name}/a [1].csv"]
    assert files_read(tmp_path, f"{path_prefix}{name}") == [f"{name}/a [1].csv", f"{name}/b.csv"]


def test_a_project_in_a_folder_with_brackets_is_found(tmp_path: Path) -> None:
    base = tmp_path / "project [v1]"
    base.mkdir()
    (base / "a.csv").write_text("user,item\nu,i\n")

    assert files_read(base, "*.csv") == ["i"]
    assert files_read(tmp_path, str(base / "*.csv")) == ["i"]


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clicks").mkdir()

    def refuses(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuses)
    with pytest.raises(SourceError, match="clicks cannot be listed: Permission denied"):
        source_files(("clicks",), tmp_path)
