"""The artefact store: generations' files by checksum, release records, the blocklist, a host's copies of both.

Imports cache.format and cache.process. Start at `artefacts`.
"""
