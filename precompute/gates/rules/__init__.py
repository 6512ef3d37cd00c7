"""Gate rules, a family in each module, a rule in each function; `judge` runs them."""
