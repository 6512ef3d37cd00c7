"""Steps of a night, a module for each; Airflow and the shell run the same functions.

Their order is `cache.config.timetable`; each has `run`, and each of the night's own `in_night`, which also returns a
row of the night's table. Start at `begin`.
"""
