"""Steps of a night, a module for each; Airflow and the shell run the same functions.

Their order is `cache.control.night_steps`; each has `run`, and each of the night's own `in_night`, which also tells a
row of the night's table. Imports every room but operations, canary, planning and cli. Start at `begin`.
"""
