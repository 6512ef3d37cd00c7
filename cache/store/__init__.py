"""The artefact store: generations' files by checksum, release records, blocklist, experiments, a host's copies.

Start at `artefacts`.
"""
