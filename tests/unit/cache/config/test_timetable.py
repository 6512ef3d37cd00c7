"""The schedule of generations as file and environment name it."""

import pytest

from cache.config.timetable import Schedule, Timetable
from cache.errors import ConfigError


def test_the_environment_outranks_the_file(tmp_path) -> None:
    file = tmp_path / "larder.toml"
    file.write_text('schedule = "0 1 * * *"\ntimezone = "Asia/Tokyo"\nschedule_grace_s = 60\n')
    from_file = Timetable.configured({"LARDER_CONFIG": str(file)})
    from_both = Timetable.configured({"LARDER_CONFIG": str(file), "LARDER_SCHEDULE": "5 5 * * *"})

    assert from_file.nights() == Schedule("0 1 * * *", "Asia/Tokyo", 60.0)
    assert from_both.nights() == Schedule("5 5 * * *", "Asia/Tokyo", 60.0)
    assert Timetable.configured({"LARDER_SCHEDULE": "", "LARDER_TIMEZONE": ""}) == Timetable()
    with pytest.raises(ConfigError, match="cannot read"):
        Timetable.configured({"LARDER_CONFIG": str(tmp_path / "none.toml")})
    with pytest.raises(ConfigError, match="schedule_grace_s"):
        Timetable.configured({"LARDER_SCHEDULE_GRACE_S": "long"})
