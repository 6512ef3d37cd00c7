"""Processes and their host: a Redis server for local use, child processes that end with their parent, cores,
interrupts, background loops.

Start at `redis_server`.
"""
