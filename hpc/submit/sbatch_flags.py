"""The flags that people know from sbatch: its letters, and what to type for one that we do not have. Login node."""

import re
from collections.abc import Collection, Sequence

from hpc.core.errors import UserError
from hpc.spec import MANAGED_SBATCH

# Theirs and ours, as `hpc submit --help` shows them.
_OURS = {"-N": "nodes", "-p": "partition", "-A": "account", "-t": "time", "-J": "name"}

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


def spelled_out(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """The arguments with long flags instead of letters: `--nodes=2` for `-N2`.

    Raises:
        UserError: a flag is sbatch's, and none of `known`, which are without dashes: says what to type.
    """
    words = list[str]()
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("-") and (text := advice(flag, known)):
            raise UserError(f"there is no flag {flag}: {text}")
        letter, value = argument[:2], argument[2:].removeprefix("=")
        ours = _OURS.get(letter) if re.match(r"-\w", argument) else None
        words.append(f"--{ours}{'=' + value if value else ''}" if ours else argument)
    return words


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
