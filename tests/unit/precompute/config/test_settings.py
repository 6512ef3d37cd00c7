"""Settings of the night: what a file may say, and what an error about it names."""

from dataclasses import replace

import pytest

from cache.errors import ConfigError
from precompute.config.settings import GateThresholds, NightConfig, TableConfig, night_config


def read(folder, text):
    (folder / "larder.toml").write_text(text)
    return NightConfig.configured({}, folder / "larder.toml")


@pytest.mark.parametrize(
    ("text", "message_pattern"),
    [
        ('index = "ivv"', "index must be auto or flat or ivf or hnsw, not 'ivv'"),
        ("artifacts = 5", "artifacts must be a string, not 5"),
        ('artifacts = ""', "artifacts must not be empty"),
        ("state = []", r"state must be a string, not \(\)"),
        ("redis_url = 6379", "redis_url must be a string, not 6379"),
        ('redis_url = "localhost:6379"', "redis_url must start with redis://"),
        ("shards = true", "shards must be a whole number, not True"),
        ("shards = 2.0", "shards must be a whole number, not 2.0"),
        ("shards = 1025", "shards must be 1 to 1,024, not 1,025"),
        ("page_bytes = 1", "page_bytes must be 4,096 to 8,388,608, not 1"),
        ("load_chunk_bytes = 0", "load_chunk_bytes must be 1 to"),
        ("history_limit = 0", "history_limit must be at least 1, not 0"),
        ("keep = -1", "keep must be at least 0, not -1"),
        ("threads = -1", "threads must be at least 0"),
        ("redis_timeout_s = 0", "redis_timeout_s must be above 0, not 0"),
        ("warm_timeout_s = -1", "warm_timeout_s must be above 0"),
        ("overlay_ttl_s = nan", "overlay_ttl_s must be a finite number, not nan"),
        ("superseded_grace_s = -0.5", "superseded_grace_s must be at least 0"),
        ('schedule = "nightly"', "schedule is a cron of five fields such as"),
        ('timezone = "Mars/Olympus"', "timezone is an IANA name such as Europe/Berlin"),
        ("schedule_grace_s = -1", "schedule_grace_s is a number of seconds from 0"),
        ('data_until = "yesterday"', "'yesterday' is not an ISO 8601 time"),
        ('colour = "red"', "unknown setting 'colour'; known are abandon_after_s"),
        ("sources = 5", r"\[sources\] must be a section of settings, not 5"),
        ("[sources]\ninteractions = 5", "interactions must be a string or a list of strings"),
        ("[sources]\ninteractions = [5]", "interactions must be a string or a list of strings"),
        ('[sources]\nformat = "orc"', r"\[sources\]: format must be auto or parquet or csv or lines"),
        ('[sources]\nuser_column = ""', r"\[sources\]: user_column must not be empty"),
        ("[sources]\nitem_features = 1", "item_features must be a string, not 1"),
        ("[gates]\nskew_overlap = inf", r"\[gates\]: skew_overlap must be a finite number"),
        ('[gates]\nskew_overlap = "0.9"', r"\[gates\]: skew_overlap must be a finite number"),
        ("[gates]\ntimeout_s = 0", r"\[gates\]: timeout_s must be above 0"),
        ("[reference]\ndims = 0", r"\[reference\]: dims must be 1 to"),
        ('tables = "x"', "tables must hold one section per table"),
        ("[tables]\nx = 5", r"\[tables.x\] must be a section of settings, not 5"),
        ("[tables]", "no table is configured"),
        ("[tables.x]\nk = 5", r"\[tables.x\]: kind is missing; it must be user_topk or"),
        ('[tables.x]\nkind = "user_top"', r"\[tables.x\]: kind must be user_topk or .*not 'user_top'"),
        ('[tables.x]\nkind = "user_topk"\nprecision = "f3"', r"precision must be .*, not 'f3'"),
        ('[tables.x]\nkind = "item_similar"\nmetric = "l2"', "metric must be inner_product or cosine"),
        ('[tables.x]\nkind = "user_topk"\nk = 1001', "k must be 1 to 1,000, not 1,001"),
        ('[tables.x]\nkind = "value"', "a value table must name its model output"),
        ('[tables."a:b"]\nkind = "user_topk"', "the name of a table has 1 to 64 letters"),
        ("shards = = 2", "cannot read"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_file_and_what_is_allowed(tmp_path, text, message_pattern):
    with pytest.raises(ConfigError, match=message_pattern) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "larder.toml") in caught.value.message


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a:b", "{a}", "a*", "é", "a\n", "x" * 65])
def test_a_namespace_is_fit_for_keys_and_folders_wherever_it_comes_from(tmp_path, name):
    with pytest.raises(ConfigError, match="namespace has 1 to 64 letters"):
        NightConfig(namespace=name)
    if name:
        with pytest.raises(ConfigError, match="namespace"):
            night_config(environment={"LARDER_NAMESPACE": name})
    with pytest.raises(ConfigError, match="namespace"):
        night_config(environment={}, namespace=name)


def test_values_given_in_code_are_held_to_the_same_rules():
    with pytest.raises(ConfigError, match="kind must be"):
        TableConfig("user_top")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads"):
        replace(NightConfig(), threads=-1)
    assert GateThresholds(coverage_of_source=1.01).timeout_s == 600.0


def test_a_file_that_is_no_text_or_a_folder_is_named(tmp_path):
    (tmp_path / "larder.toml").write_bytes(b"\xff\xff")
    for path in (tmp_path / "larder.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read configuration file"):
            NightConfig.configured({}, path)
    with pytest.raises(ConfigError, match="does not exist"):
        NightConfig.configured({}, tmp_path / "none.toml")


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_a_byte_order_mark_of_a_file_is_skipped(tmp_path, line_break):
    lines = ["[sources]", 'interactions = ["clicks.csv"]', 'quote = ""', 'escape = "\\\\"', ""]
    (tmp_path / "larder.toml").write_bytes(b"\xef\xbb\xbf" + line_break.join(lines).encode())
    sources = NightConfig.configured({}, tmp_path / "larder.toml").sources
    assert (sources.interactions, sources.quote, sources.escape) == (("clicks.csv",), "", "\\")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-8"])
def test_a_file_is_read_as_its_byte_order_mark_says(tmp_path, encoding):
    """PowerShell and Notepad write UTF-16, and programs that add a mark may add another."""
    text = '\ufeff[sources]\r\ninteractions = ["größe.csv"]\r\n'
    text = "\ufeff" + text if encoding == "utf-8" else text
    (tmp_path / "larder.toml").write_bytes(text.encode(encoding))
    interaction_paths = NightConfig.configured({}, tmp_path / "larder.toml").sources.interactions
    assert interaction_paths == ("größe.csv",)


def test_a_file_that_is_not_utf_8_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "larder.toml").write_bytes("# größe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"larder\.toml: it is not UTF-8: save it as UTF-8"):
        NightConfig.configured({}, tmp_path / "larder.toml")


@pytest.mark.parametrize("quote", ["false", '"\'"'])
def test_quotes_of_csv_files_can_be_another_sign_or_none(tmp_path, quote):
    (tmp_path / "larder.toml").write_text(f"[sources]\nquote = {quote}\n")
    configured_quote = NightConfig.configured({}, tmp_path / "larder.toml").sources.quote
    assert configured_quote == ("" if quote == "false" else "'")


def test_a_whole_file_is_read_as_it_is_meant(tmp_path):
    config = read(
        tmp_path,
        'namespace = "shop-1.eu"\ndata_until = 2026-01-31T00:00:00Z\nredis_timeout_s = 5\n'
        '[sources]\ninteractions = "clicks/*"\n[serving]\nport = 1\n'
        '[tables.top]\nkind = "user_topk"\nk = 7\n',
    )
    assert config.data_until == "2026-01-31T00:00:00+00:00"
    assert config.sources.interactions == ("clicks/*",)
    assert config.tables == {"top": TableConfig("user_topk", k=7)}
    assert config.path("x") == tmp_path / "x"


def test_an_error_never_shows_the_password_of_redis(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, 'redis_url = "http://:secret@host"')
    assert "secret" not in caught.value.message
