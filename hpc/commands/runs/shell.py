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
from hpc.slurm.alive import chosen_node, running_job
from hpc.slurm.srun import step_beside_training


@dataclass(frozen=True, kw_only=True)
class ShellOptions(cli.RunOptions):
    """Open a shell on a node of a run, in the run's directory. The shell sees the run's GPUs and ends with its job."""

    node: Annotated[str | None, Flag(metavar="NAME")] = None
    """Name of the node, as hpc status shows it. Default: the first node of the run."""


def shell(options: ShellOptions) -> int:
    """Run the shell to its end, and return its exit code; with --json, print the command line instead."""
    run = cli.find_own_run(options.run, options.runs_dir)
    job = running_job(run)
    node = chosen_node(run, job, options.node)
    program = [os.environ.get("SHELL", "/bin/sh"), "-l"]
    command = [*step_beside_training(job.job_id, [node]), f"--chdir={run.path}", "--pty", *program]
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
