"""Processes of the service: the server, its workers, their metrics together, open files, garbage collection.

Imports serving.fast_http and serving.config. Start at `server`.
"""
