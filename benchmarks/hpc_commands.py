"""hpc's commands, as a user types them: for the benchmarks that submit runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

_HPC = [sys.executable, "-m", "hpc"]


def hpc(*arguments: str, directory: Path = ROOT) -> Any:
    """Type `hpc ARGUMENTS --json` in a directory, and read the answer."""
    # What comes behind `--` is the script's own.
    own = arguments.index("--") if "--" in arguments else len(arguments)
    command = [*_HPC, *arguments[:own], "--json", *arguments[own:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=directory)
    return json.loads(done.stdout)


@contextmanager
def testbed(*flags: str) -> Iterator[None]:
    """A Slurm on this machine, for as long as it is needed; all that is typed meanwhile uses it."""
    command = [*_HPC, "testbed"]
    done = subprocess.run([*command, "up", "--json", *flags], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    os.environ["SLURM_CONF"] = json.loads(done.stdout)["slurm_conf"]
    try:
        yield
    finally:
        subprocess.run([*command, "down"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
