"""What to type for a flag of sbatch's that `hpc submit` does not have. Runs on the login node."""

from collections.abc import Collection

from hpc.spec import MANAGED_SBATCH

# sbatch has a letter for them, and we have none.
_LETTERS = {
    "-a": "array", "-C": "constraint", "-c": "cpus-per-task", "-D": "chdir", "-d": "dependency", "-e": "error",
    "-G": "gpus", "-n": "ntasks", "-o": "output", "-q": "qos", "-w": "nodelist", "-x": "exclude",
}  # fmt: skip
# Of sbatch's other options, those that take a value: our own list, for `sbatch --help` fails without a configuration.
_WITH_VALUE = {
    "acctg-freq", "batch", "begin", "bb", "bbf", "clusters", "cluster-constraint", "comment", "core-spec",
    "cores-per-socket", "cpu-freq", "deadline", "delay-boot", "dependency", "distribution", "extra-node-info",
    "gpu-bind", "gpu-freq", "gres-flags", "hint", "licenses", "mail-type", "mail-user", "mcs-label", "mem-bind",
    "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "nodefile", "nodelist", "ntasks-per-core",
    "ntasks-per-gpu", "ntasks-per-socket", "prefer", "priority", "profile", "propagate", "reservation", "segment",
    "sockets-per-node", "switches", "thread-spec", "threads-per-core", "tmp", "tres-bind", "tres-per-task",
    "wait-all-nodes", "wckey",
}  # fmt: skip
_ALONE = {
    "contiguous",
    "exclusive",
    "hold",
    "overcommit",
    "oversubscribe",
    "reboot",
    "spread-job",
    "use-min-nodes",
    "x11",
}


def advice(flag: str, known: Collection[str]) -> str | None:
    """What to type instead of a flag that is none of `known`, which are without dashes; None: it is not sbatch's."""
    name = _LETTERS.get(flag, flag.removeprefix("--").replace("_", "-"))
    if name in known:
        return f"use --{name}" if flag in _LETTERS else None
    if name == "gres":
        return "use --gpus-per-node 4 or a100:4 for GPUs, --sbatch gres=NAME:COUNT for others"
    if name in MANAGED_SBATCH:
        return MANAGED_SBATCH[name]
    if name in _WITH_VALUE:
        return f"use --sbatch {name}=VALUE"
    return f"use --sbatch {name}" if name in _ALONE else None
