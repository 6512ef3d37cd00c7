"""Gate rules, a family in each module, a rule in each function; `judge` runs them.

Imports gates.evidence. Start at `records`.

A new rule is a function under `@integrity("its_id")` or `@judgement("its_id")` in the module of its family, its name in
`judge.GATES`, its threshold in `GateThresholds` of `config.sections`, and a fault that it alone finds in
`tests/integration/night/test_gate_corpus.py`. An id that another room refers to stands in `cache.format.gate_rules`.
"""
