"""Usage, at night: what callers ask for and no night knows."""
