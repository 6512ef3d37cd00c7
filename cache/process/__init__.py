"""Processes and their host: a local Redis server, child processes, cores, interrupts, background loops.

Start at `redis_server`.
"""
