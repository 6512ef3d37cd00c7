"""Near-match reuse in `larder.toml`: a section for each table, off without one."""

from pathlib import Path

import pytest

from cache.config.serving import NearConfig, ServingConfig
from cache.errors import ConfigError


def load(folder: Path, text: str) -> ServingConfig:
    (folder / "larder.toml").write_text(text)
    return ServingConfig.load({"LARDER_CONFIG": str(folder / "larder.toml")})


def test_a_table_without_a_section_has_none(tmp_path: Path) -> None:
    assert ServingConfig().near == {} and load(tmp_path, "[serving]\nport = 1\n").near == {}


def test_every_section_is_of_one_table(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "[serving.near.user_topk]\nerror = 0.02\noverlap = 0.8\n[serving.near.mood]\n"
        '[tables.user_topk]\nkind = "user_topk"\n[tables.mood]\nkind = "value"\nvalue = "mood"\n',
    )

    assert config.near == {"user_topk": NearConfig(0.02, 0.8), "mood": NearConfig()}
    assert NearConfig().error == 0.01


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("[serving.near.t]\nerror = 0\n", "[near.t]: error must be 0.0001 to 0.5, not 0"),
        ("[serving.near.t]\noverlap = 1.5\n", "overlap must be above 0, at most 1, not 1.5"),
        ("[serving.near.t]\nentries = 1\n", "entries must be 16 to 65,536, not 1"),
        ("[serving.near.t]\nthreshold = 0.9\n", "unknown setting 'threshold'; known are entries, error, overlap"),
        ("[serving]\nnear = 3\n", "near must hold one section per table, e.g. [near.user_topk], not 3"),
        (
            '[serving.near.user_tpk]\n[tables.user_topk]\nkind = "user_topk"\n',
            "[serving.near.user_tpk]: there is no table 'user_tpk'; [tables] has user_topk",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, text: str, expected_message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)

    assert expected_message in str(refused.value) and "larder.toml" in str(refused.value)


def test_no_environment_variable_sets_it() -> None:
    assert ServingConfig.load({"LARDER_NEAR": '{"t": {}}'}).near == {}
