"""Mutation testing: small changes of the code, and the tests that fail for each. Start with `__main__`."""
