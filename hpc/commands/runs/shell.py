"""`hpc shell`: open a shell on a node on which a run trains, beside its ranks. Runs on the login node."""

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from hpc.base.errors import UserError
from hpc.base.flags import Flag
from hpc.commands import cli
from hpc.slurm import client as slurm
from hpc.slurm.alive import running_job


@dataclass(frozen=True, kw_only=True)
class ShellOptions(cli.RunOptions):
    """Open a shell on a node of a run, in the run's directory. The shell sees the run's GPUs and ends with its job."""

    node: Annotated[str | None, Flag(metavar="NAME")] = None
    """Name of the node, as hpc status shows it. Default: the first node of the run."""


def shell(options: ShellOptions) -> int:
    """Run the shell to its end, and return its exit code; with --json, print the command line instead."""
    run = cli.find_own_run(options.run, options.runs_dir)
    job = running_job(run)
    nodes = slurm.hostnames(job.nodes)
    node = nodes[0] if options.node is None else options.node
    if node not in nodes:
        raise UserError(f"--node is {node!r}, but run {run.name} runs on {', '.join(nodes)}")
    # Without --overlap, the step would wait until the training ends. It shares what the ranks have: binding it to some
    # of their CPUs would slow down a single rank.
    command = [
        "srun", f"--jobid={job.job_id}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks-per-node=1",
        "--cpu-bind=none", f"--chdir={run.path}", "--pty", os.environ.get("SHELL", "/bin/sh"), "-l",
    ]  # fmt: skip
    if options.json:
        cli.print_json({"run": run.name, "job_id": job.job_id, "node": node, "command": command})
        return 0
    if not sys.stdin.isatty():
        raise UserError(
            "hpc shell needs a terminal, and stdin is not one: for a single command, use the srun command of "
            "hpc shell --json"
        )
    return subprocess.run(command, check=False).returncode


main = partial(cli.run, shell, ShellOptions, "shell")
