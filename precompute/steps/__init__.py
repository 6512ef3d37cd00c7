"""Steps of a night, one module each; Airflow and the shell run the same functions.

Their order is `cache.config.timetable`. Each has `run`; each step of the night in one process also has `in_night`,
which returns a row of the night's table. Start at `begin`.
"""
