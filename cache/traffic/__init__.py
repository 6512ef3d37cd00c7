"""Traffic: the experiments of a namespace, and splits of requests for canaries and experiments."""
