"""Checks of the pinned dependencies: advisories and licences. Start with `locks`, then `audit` or `licences`."""
