"""Processes and their host: a Redis of one's own, children that die with their parent, cores, interrupts, loops.

Imports cache.errors and cache.resp. Start at `redis_server`.
"""
