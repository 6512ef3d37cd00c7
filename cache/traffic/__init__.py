"""Traffic: a namespace's experiments, and splits of requests for canaries and experiments."""
