"""`hpc top`: the present use of GPU and CPUs by each rank of a run. Runs on the login node.

A step beside the training starts `jobs.ranks.usage` on each node; with --cluster local it runs on this machine.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc.base.errors import UserError
from hpc.base.text import few, visible
from hpc.commands import cli
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.slurm import client as slurm
from hpc.slurm.alive import local_jobs, running_job
from hpc.slurm.srun import own_pythonpath, step_beside_training

_TITLES = ("rank", "node", "CPU", "processes", "GPU", "busy", "memory")


@dataclass(frozen=True, kw_only=True)
class TopOptions(cli.RunOptions):
    """Show the present CPU use of each rank with its loader workers (100% is one core), and its GPU use."""


def top(options: TopOptions) -> int:
    """Print a table with a line for each rank and GPU. Returns 1 if a node did not answer."""
    run = cli.find_own_run(options.run, options.runs_dir)
    nodes = list[str]()
    if RunSpec.load(run).cluster == "slurm":
        job = running_job(run)
        nodes = slurm.hostnames(job.nodes)
        step = [*step_beside_training(job.job_id, nodes), "--kill-on-bad-exit=0"]
        answers = parse(slurm.run_srun([*step, *_measurement(run)]))
    elif local_jobs(run):
        answers = parse(subprocess.run(_measurement(run), stdout=subprocess.PIPE, text=True, check=True).stdout)
    else:
        raise UserError(f"run {run.name} is not running: hpc status {run.name} shows its state")
    ranks = sorted((rank for answer in answers.values() for rank in answer), key=lambda rank: int(rank["rank"]))
    if options.json:
        cli.print_json(ranks)
    elif ranks:
        Console(soft_wrap=True).print(_table(ranks))
    if silent := [node for node in nodes if node not in answers]:
        print(visible(f"hpc top: {few(silent)} did not answer: see hpc status {run.name}"), file=sys.stderr)
        return 1
    if not ranks and not options.json:
        print(f"no rank runs now: hpc status {run.name} says what the run does")
    return 0


def _measurement(run: RunDir) -> list[str]:
    return ["env", f"PYTHONPATH={own_pythonpath()}", sys.executable, "-P", "-m", "jobs.ranks.usage", str(run.path)]


def parse(printed: str) -> dict[str, list[dict[str, Any]]]:
    """Parse the output of the nodes: return the ranks by node, and skip other lines. Pure."""
    found = dict[str, list[dict[str, Any]]]()
    for line in printed.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a prolog's line, or cut off: no answer of the node
            answer = json.loads(line)
            found[answer["node"]] = answer["ranks"]
    return found


def _table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    drawn = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1), header_style="bold")
    for title in _TITLES:
        drawn.add_column(title, justify="left" if title in {"node", "GPU"} else "right", no_wrap=True)
    for rank in ranks:
        own = (str(rank["rank"]), rank["node"], f"{rank['cpu_percent']:.0f}%", str(rank["processes"]))
        for number, gpu in enumerate(rank["gpus"] or [None]):
            cells = (*(own if number == 0 else [""] * len(own)), *_gpu_cells(gpu))
            drawn.add_row(*(Text(visible(cell)) for cell in cells))
    return drawn


def _gpu_cells(gpu: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Format the name, utilization and memory of a GPU, with dashes for no GPU and unknown values."""
    if gpu is None:
        return "-", "-", "-"
    busy, used, total = gpu["utilization_percent"], gpu["memory_used_mib"], gpu["memory_total_mib"]
    memory = "-" if used is None or total is None else f"{used / 1024:.1f}/{total / 1024:.1f} GiB"
    return f"{gpu['index']} {gpu['name']}", "-" if busy is None else f"{busy:.0f}%", memory


main = partial(cli.run, top, TopOptions, "top")
