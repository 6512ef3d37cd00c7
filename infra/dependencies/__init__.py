"""Dependencies that the locks pin: advisories and licences. Start with `locks`, then `audit` or `licences`."""
