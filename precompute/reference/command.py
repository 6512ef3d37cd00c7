"""Command `train`: trains the reference bundle and reports its recall of held-out interactions."""

import argparse
from typing import Any

from precompute.config.console import OutputContent, field_table
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.reference.train import train_reference


def train(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> OutputContent:
    """Train the reference bundle on the configured sources; return the report."""
    training_report = train_reference(config, data_until=arguments.data_until, progress=progress)
    if arguments.json:
        return training_report
    report_lines: list[Any] = [field_table(training_report)]
    if training_report["recall_at_20"] is not None:
        holdout_selection = "the latest" if training_report["held_out"] == "latest" else "chosen at random"
        report_lines.append(
            f"{training_report['recall_at_20']:.0%} of the held-out interactions ({holdout_selection}) were "
            "among 20 suggestions: "
            f"the best of {training_report['shapes_tried']} models tried."
        )
    if 0 < (untimed := training_report["untimed"]) < training_report["interactions"]:
        report_lines.append(
            f"{untimed:,} of {training_report['interactions']:,} interactions have no time: they count as the oldest "
            "of all, before any cut."
        )
    return report_lines
