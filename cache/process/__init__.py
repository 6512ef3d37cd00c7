"""Processes and their host: a Redis of one's own, children that die with their parent, cores, interrupts, loops.

Start at `redis_server`.
"""
