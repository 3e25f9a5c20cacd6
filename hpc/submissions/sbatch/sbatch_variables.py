"""Reads the defaults of a submission's flags from files and from the variables of sbatch. Runs on the login node."""

from collections.abc import Mapping
from typing import Any

from hpc.base.flag_files import Defaults, merge_defaults, read_defaults

# Variables that set a flag of ours. Others, such as SBATCH_EXPORT, are removed (hpc.slurm.client.adopt_environment).
_VARIABLES = {
    "SBATCH_ACCOUNT": "account", "SBATCH_CONSTRAINT": "constraint", "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_EXCLUSIVE": "sbatch", "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos", "SBATCH_RESERVATION": "sbatch", "SBATCH_TIMELIMIT": "time",
}  # fmt: skip
# The units that sbatch assumes for a number without a unit.
_UNITS = {"SBATCH_MEM_PER_NODE": "M", "SBATCH_TIMELIMIT": "m"}


def read(known: Mapping[str, bool], environment: Mapping[str, str]) -> list[Defaults]:
    """Return the defaults of each file and variable; later ones win. `known` are the flags that a file may set.

    Raises:
        UserError: a file cannot be read, or has an unknown flag.
    """
    found = read_defaults(known)
    if "SLURM_JOB_ID" in environment:
        return found  # inside a job, the variables describe that job
    for variable, flag in _VARIABLES.items():
        if value := environment.get(variable):
            found.append(Defaults(source=variable, settings={flag: _flag_value(variable, flag, value)}))
    return found


def merged(known: Mapping[str, bool], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the default of each flag from all sources together. Raises UserError as `read` does."""
    return merge_defaults(read(known, environment))


def _flag_value(variable: str, flag: str, value: str) -> str | list[str]:
    if flag == "sbatch":
        option = variable.removeprefix("SBATCH_").lower()
        return [option if value == option else f"{option}={value}"]
    return value + _UNITS.get(variable, "") if value.isdigit() else value
