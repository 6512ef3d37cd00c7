"""Steps of a night, a module for each; Airflow and the shell run the same functions.

Imports every room but planning, canary and cli. Start at `pipeline`, then `begin`.
"""
