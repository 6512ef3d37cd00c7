"""Processes of the service: the server, its workers, their log, and the resources that they take.

Start at `server`.
"""
