"""Quality at night: the probe, a sample of inputs from which the service recomputes answers."""
