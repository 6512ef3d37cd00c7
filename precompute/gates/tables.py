"""Gate on what readers may ask for: no table that the live generation answers from goes missing unnoticed."""

from cache.manifest import Table
from precompute.gates.candidate import Candidate
from precompute.gates.verdict import Verdict, none_of


def tables_of_live(candidate: Candidate) -> Verdict:
    """Live tables that are gone or became another kind, and tables of lists that nothing live can be compared with.

    A renamed table passes every comparison, for it has none; the lists of the first night with lists are not counted.
    """
    rule = "tables_of_live"
    if candidate.live is None:
        return candidate.uncompared(rule, 0)
    before, now = candidate.live.tables, candidate.manifest.tables
    notes = [
        f"{name} is {'gone' if name not in now else 'of another kind or entity'}"
        for name, table in before.items()
        if name not in now or _what(now[name]) != _what(table)
    ]
    if any(table.kind == "topk" for table in before.values()):
        notes += [
            f"{name} has no lists to be compared with"
            for name, table in now.items()
            if table.kind == "topk" and name not in before
        ]
    found = none_of(rule, len(notes), "; ".join(notes))
    return Verdict(rule, found.passed, found.value, 0, found.note, candidate.baseline)


def _what(table: Table) -> tuple[str, str]:
    return table.kind, table.entity
