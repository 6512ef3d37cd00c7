"""Newer events: the stream of events followed, and who has any that a generation lacks.

Imports generations and metrics, and everything below them. Start at `newer_events`, then `event_follower`.
"""
