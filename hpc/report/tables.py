"""The tables beside the page, one CSV file each, for any number of runs. Pure; runs on the login node.

Times are seconds since the epoch. Every table names the run in its first column and exists always, if only with its
header, so that whoever reads the tables of many runs need not ask which there are.
"""

from collections.abc import Sequence

import pandas as pd

from hpc.report.gather import RunRecord


def tables_of(records: Sequence[RunRecord]) -> dict[str, pd.DataFrame]:
    """The tables by file name."""
    return {
        "train.csv": _joined(records, [record.train for record in records]),
        "eval.csv": _joined(records, [record.evaluations for record in records]),
        "attempts.csv": _joined(records, [record.attempts for record in records]),
        "interruptions.csv": _joined(records, [record.interruptions for record in records]),
        "classes.csv": _joined(records, [record.classes for record in records]),
    }


def labels_of(records: Sequence[RunRecord]) -> list[str]:
    """What to call each run: its name, or its directory where two have the same name."""
    names = [record.run.name for record in records]
    return [
        name if names.count(name) == 1 else str(record.run.path) for name, record in zip(names, records, strict=True)
    ]


def _joined(records: Sequence[RunRecord], tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    named = [table.assign(run=label) for label, table in zip(labels_of(records), tables, strict=True)]
    full = [table for table in named if not table.empty] or named[:1]
    joined = pd.concat(full, ignore_index=True)
    # Steps are whole numbers, also where one is unknown.
    return joined[["run", *tables[0].columns]].convert_dtypes()
