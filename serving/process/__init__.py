"""Processes of the service: server, workers, their log, and their resources.

Start at `server`.
"""
