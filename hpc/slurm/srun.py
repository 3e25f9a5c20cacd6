"""Builds the srun of a job step that runs next to the training, and its PYTHONPATH. Runs on the login node."""

import os
from collections.abc import Sequence
from pathlib import Path


def step_beside_training(job_id: str, nodes: Sequence[str]) -> list[str]:
    """Return an srun that starts one task on each of these nodes of a job; its program and arguments follow.

    The task shares everything with the ranks, also the GPUs, and reserves nothing.
    """
    # Without --overlap the step would wait until the training ends. The job's CPUs belong to the ranks: a step that is
    # bound to some of them would slow down a single rank.
    place = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", "--ntasks-per-node=1", "--cpu-bind=none"]
    return ["srun", f"--jobid={job_id}", "--overlap", *place]


def own_pythonpath(packages: Path = Path(__file__).parents[2]) -> str:
    """Return the PYTHONPATH with which nodes import our packages from a directory, not a user's of the same names.

    The user's own PYTHONPATH follows this directory: our dependencies may lie there.
    """
    return os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
