"""`submit --wait`: follow a run until it ends, then print its result. Runs on the login node."""

import shlex
import sys
import time
from typing import Any

from hpc import cli
from hpc.core.rundir import RunDir
from hpc.status.__main__ import print_table
from hpc.status.run_view import TERMINAL, Summary
from hpc.status.status_cache import StatusCache
from hpc.status.table import wait_reason

_POLL_SECONDS = 1.0


def wait_for_end(run: RunDir, answer: dict[str, Any] | None) -> int:
    """Wait for the end; 0 if the run completed, 1 if it failed or was cancelled.

    With `answer`, the submission's JSON document, nothing is printed but that document with the final state in it.
    """
    if answer is None:
        print(f"run {run.name} in {run.path}\nCtrl-C ends the wait, not the run.", flush=True)
    printed, cache = "", StatusCache()
    while (row := cache.summary(run))["state"] not in TERMINAL:
        now = progress(row)
        if answer is None and now != printed:
            print(f"{time.strftime('%H:%M:%S')} {now}", flush=True)
            printed = now
        time.sleep(_POLL_SECONDS)
    if answer is None:
        _print_result(run, row)
    else:
        cli.print_json({**answer, "status": row})
    return 0 if row["state"] == "completed" else 1


def progress(row: Summary) -> str:
    """The progress of a run in one line."""
    if row["state"] == "pending":
        return ": ".join(filter(None, ["pending", wait_reason(row)]))
    if row["step"] is None:
        return f"attempt {row['attempt'] or 1}: starting"
    return f"attempt {row['attempt']}: epoch {row['epoch']} step {row['step']} loss {row['train_loss']:.4f}"


def _print_result(run: RunDir, row: Summary) -> None:
    print_table([row], details=True)
    hpc, path = cli.own_command(), shlex.quote(str(run.path))
    if row["detail"]:
        print(f"{row['state']}: {row['detail']}", file=sys.stderr)
    result = f"\nresult   {run.final}" if row["state"] == "completed" else ""
    print(f"logs     {run.logs}{result}\nnext     {hpc} status {path}\n         {hpc} logs {path}")
