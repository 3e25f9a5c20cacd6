"""Builds the srun of a job step beside the training, and the PYTHONPATH of our programs. Runs on the login node."""

import os
from collections.abc import Sequence
from pathlib import Path

from hpc.run.rundir import LIBRARY


def step_beside_training(job_id: str, nodes: Sequence[str]) -> list[str]:
    """Return the start of an srun command for one task on each of these nodes of a job. The caller adds the program.

    The task reserves nothing: it shares the CPUs, memory and GPUs of the ranks.
    """
    # Without --overlap the step would wait until the training ends. The job's CPUs belong to the ranks: binding the
    # step to some of these CPUs would slow down a single rank.
    place = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", "--ntasks-per-node=1", "--cpu-bind=none"]
    return ["srun", f"--jobid={job_id}", "--overlap", *place]


_PACKAGES = Path(__file__).parents[2]


def own_pythonpath(packages: Path = _PACKAGES) -> str:
    """Return a PYTHONPATH that begins with the directory of our packages, before a user's packages of the same names.

    The PYTHONPATH of this process follows, because our dependencies may be there.
    """
    return os.pathsep.join(filter(None, [str(packages), str(packages / LIBRARY), os.environ.get("PYTHONPATH")]))


def users_pythonpath(pythonpath: str, packages: Path = _PACKAGES) -> list[str]:
    """Return the directories of a PYTHONPATH without those that `own_pythonpath` has added."""
    ours = {"", str(packages), str(packages / LIBRARY)}
    return [directory for directory in pythonpath.split(os.pathsep) if directory not in ours]
