"""Usage at night: the ids that callers request and no generation knows."""
