"""Features of a user with newer events: what the night gave the user tower, and what events set since. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from cache.errors import InvalidInput
from cache.format.ids import FeatureValue
from cache.model.feature_checks import check_features
from cache.model.tower_spec import InputSpec


def features_with(
    published: Mapping[str, Any], values: Mapping[str, Any], inputs: Sequence[InputSpec]
) -> dict[str, FeatureValue] | None:
    """Features by column, as callers send them; None where the model lacks one of its inputs, as a night would say.

    `published` is the user's row of the generation, `values` what `AttributeEvents.of_user` has behind its position;
    `inputs` are the feature inputs of the model. A value that an input cannot take counts as none.
    """
    feature_by_column: dict[str, FeatureValue] = {}
    for input_spec in inputs:
        column = str(input_spec.column)
        raw_value = values[column] if column in values else published.get(column)
        value = tuple(raw_value) if isinstance(raw_value, list) else raw_value
        if value is None or not _fits(input_spec, value):
            return None
        feature_by_column[column] = value
    return feature_by_column


def takes_any(values: Mapping[str, Any], inputs: Sequence[InputSpec]) -> bool:
    """True if a model takes one of these attributes: then a user with newer values is one with newer events."""
    return any(input_spec.column in values for input_spec in inputs)


def _fits(spec: InputSpec, value: FeatureValue) -> bool:
    try:
        check_features((spec,), {str(spec.column): value})
    except (InvalidInput, TypeError, ValueError):
        return False
    return True
