"""Operations: a whole night in one process, training the reference bundle, rolling back, restoring a lost Redis.

Imports steps. Start at `night`.
"""
