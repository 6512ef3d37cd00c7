"""Defects with wrong answers to plant in a copy of the product, each of a kind that an outside audit once found."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Change:
    """Text of a source file and its replacement."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Plant:
    """A defect: what a caller sees, and the changes of source that cause it."""

    name: str
    symptom: str
    changes: tuple[Change, ...]

    def put_into(self, tree: Path) -> None:
        """Change the sources below `tree`; raise ValueError for a text that is not there exactly once."""
        for change in self.changes:
            path = tree / change.file
            source = path.read_text()
            if source.count(change.old) != 1:
                raise ValueError(f"plant {self.name}: {change.file} does not hold its text once")
            path.write_text(source.replace(change.old, change.new))


_FILTERED_LOOKUP = "serving/filters/filtered_lookup.py"
_ANSWER_BUILDER = "serving/engine/answer_builder.py"
_ENTITY = "serving/engine/entity.py"
_ARMS = "serving/traffic/arms.py"

PLANTS = (
    Plant(
        "search_without_events",
        "a search under a filter uses the night's vector of a user, and says that it counts the newer events",
        (
            Change(
                _FILTERED_LOOKUP,
                "replace(context.options, k=None, filter=None, rerank=None, exclude=())",
                "replace(context.options, k=None, filter=None, rerank=None, exclude=(), max_events=0)",
            ),
            Change(
                _FILTERED_LOOKUP,
                "self._ladder.newer_inputs.copy_newer_input(snapshot, vector_case, cases[case_index])",
                "pass",
            ),
        ),
    ),
    Plant(
        "click_ends_live_answer",
        "a user with interactions but without a record is not answered live any more after a click",
        (
            Change(
                _ENTITY,
                "and self.directory_position >= 0\n            and self.reason != MissReason.NOT_IN_GENERATION",
                "and self.directory_position >= 0",
            ),
        ),
    ),
    Plant(
        "known_user_turns_to_sent_history",
        "the list of a known user becomes that of the sent history where k is more than is left",
        (
            Change(
                _ANSWER_BUILDER,
                "filter_mask is None and is_used_up and not pending.is_answered_by_night(record)",
                "filter_mask is None and left_item_count < min(pending.k, len(record.items))",
            ),
        ),
    ),
    Plant(
        "default_names_what_the_user_had",
        "the default list of a user without a record names items that the user had by the night",
        (
            Change(
                _ANSWER_BUILDER,
                "context.excluded_ordinals(snapshot), seen_ordinals, *event_exclusions",
                "context.excluded_ordinals(snapshot), *event_exclusions",
            ),
        ),
    ),
    Plant(
        "short_counts_one_too_many",
        "a list under a filter is called short although exactly k items pass",
        (
            Change(
                _ANSWER_BUILDER,
                "int(filter_mask.among(np.unique(excluded_ordinals)).sum()) < k",
                "int(filter_mask.among(np.unique(excluded_ordinals)).sum()) <= k",
            ),
        ),
    ),
    Plant(
        "arm_ignores_later_blocks",
        "an arm of an experiment goes on serving what is blocked in the control's namespace after its start",
        (
            Change(
                _ARMS,
                "await asyncio.gather(*(self._enforce(arm) for arm in list(self._arm_by_namespace.values())))",
                "return",
            ),
        ),
    ),
    Plant(
        "arms_are_not_sticky",
        "a key gets another arm after a restart of the service, and from another replica",
        (
            Change(
                _ARMS,
                "arm_name = None if arm_owners is None else arm_owners.owner_of(assignment_key)",
                'arm_name = None if arm_owners is None else arm_owners.owner_of(assignment_key + b"%d" % id(self))',
            ),
        ),
    ),
    Plant(
        "excluded_item_comes_back_by_search",
        "an item that the request excludes is named where a search under a filter makes the list",
        (
            Change(
                _ANSWER_BUILDER,
                "context.excluded_ordinals(snapshot) | pending.history_in(snapshot).item_numbers",
                "pending.history_in(snapshot).item_numbers",
            ),
        ),
    ),
    Plant(
        "vector_of_a_search_is_counted",
        "the metrics count an entity of `user_vector` for a filtered lookup that nobody sent for that table",
        (Change("serving/engine/ladder.py", "if not context.is_part_of_answer:", "if True:"),),
    ),
    Plant(
        "erased_user_keeps_the_stored_list",
        "a user who was erased is answered from the stored record",
        (
            Change(
                "serving/generations/snapshot.py",
                "return raw_id in blocklist.entities or raw_id in blocked_of_kind",
                'return table.entity != "user" and (raw_id in blocklist.entities or raw_id in blocked_of_kind)',
            ),
        ),
    ),
)
