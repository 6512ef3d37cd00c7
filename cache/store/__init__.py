"""The artefact store: generations' files by checksum, release records, blocklist, experiments, a host's copies.

Imports cache.format and cache.process. Start at `artefacts`.
"""
