"""All rows of docs/parity.md by subject.

To add a row: write a function of a side in a file of `features`, and its `Row` in the list there.
"""

from __future__ import annotations

from benchmarks.parity.features import (
    again,
    evaluation,
    examples,
    group,
    layers,
    loops,
    models,
    schedules,
    state,
    statistics,
)
from benchmarks.parity.rows import Row

SUBJECTS: dict[str, list[Row]] = {
    "Training loops": loops.ROWS,
    "Statistics over a step": statistics.ROWS,
    "Optimizers": schedules.OF_OPTIMIZERS,
    "Learning rates": schedules.OF_SCHEDULERS,
    "Layers": layers.ROWS,
    "Several models": models.ROWS,
    "Evaluation": evaluation.ROWS,
    "State": [*state.ROWS, *again.ROWS],
    "Process group": group.ROWS,
    "Examples": examples.ROWS,
}
ROWS = [row for rows in SUBJECTS.values() for row in rows]
