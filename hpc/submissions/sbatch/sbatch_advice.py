"""Gives advice on options of sbatch that are not flags of ours. Runs on the login node."""

import re
import shlex
from collections.abc import Sequence

from hpc.run.spec import MANAGED_SBATCH

LETTERS = {
    "-A": "account", "-a": "array", "-B": "extra-node-info", "-b": "begin", "-C": "constraint", "-c": "cpus-per-task",
    "-D": "chdir", "-d": "dependency", "-e": "error", "-F": "nodefile", "-G": "gpus", "-H": "hold", "-i": "input",
    "-J": "job-name", "-k": "no-kill", "-L": "licenses", "-M": "clusters", "-m": "distribution", "-N": "nodes",
    "-n": "ntasks", "-O": "overcommit", "-o": "output", "-p": "partition", "-Q": "quiet", "-q": "qos",
    "-S": "core-spec", "-s": "oversubscribe", "-t": "time", "-v": "verbose", "-W": "wait", "-w": "nodelist",
    "-x": "exclude",
}  # fmt: skip
"""The short options of sbatch, with their long names."""
# The options of sbatch are listed here because `sbatch --help` needs a slurm.conf.
WITH_VALUE = {
    "acctg-freq", "batch", "begin", "bb", "bbf", "clusters", "cluster-constraint", "comment", "core-spec",
    "cores-per-socket", "cpu-freq", "deadline", "delay-boot", "dependency", "distribution", "extra-node-info",
    "gpu-bind", "gpu-freq", "gres-flags", "hint", "licenses", "mail-type", "mail-user", "mcs-label", "mem-bind",
    "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "nodefile", "nodelist", "ntasks-per-core",
    "ntasks-per-gpu", "ntasks-per-socket", "prefer", "priority", "profile", "propagate", "reservation", "segment",
    "sockets-per-node", "switches", "thread-spec", "threads-per-core", "tmp", "tres-bind", "tres-per-task",
    "wait-all-nodes", "wckey",
}  # fmt: skip
"""Options of sbatch that --sbatch may set and that have a value."""
ALONE = {
    "contiguous", "exclusive", "hold", "overcommit", "oversubscribe", "reboot", "spread-job", "use-min-nodes", "x11",
}  # fmt: skip
"""Options of sbatch that --sbatch may set and that need no value."""


def explain(arguments: Sequence[str], at: int) -> str | None:
    """Return advice on `arguments[at]`: an option of sbatch, or a misplaced script or `--`. None for other words."""
    word = arguments[at]
    if word == "--" and at == len(arguments) - 1:
        return "nothing follows --: give your script and its arguments, -- script.py ARGS"
    if "--" in arguments[: at + 1]:
        return "only hpc submit, sweep, scaling and fork take words after --: leave out -- and what follows"
    for place in (0, at):
        if re.fullmatch(r"[^-].*\.py", script := arguments[place]):
            return f"put -- before {script}: {shlex.join([*arguments[:place], '--', *arguments[place:]])}"
    flag = word.partition("=")[0] if word.startswith("--") else word[:2]
    text = advice(flag) if flag.startswith("-") else None
    return text and f"there is no flag {flag}: {text}"


def advice(flag: str) -> str | None:
    """Return advice on an option of sbatch that we lack; None if sbatch lacks the option, too."""
    name = LETTERS.get(flag, flag.removeprefix("--").replace("_", "-"))
    if name == "gres":
        return "use --gpus-per-node 4 or a100:4 for GPUs, --sbatch gres=NAME:COUNT for others"
    if name in MANAGED_SBATCH:
        return MANAGED_SBATCH[name]
    if name in WITH_VALUE:
        return f"use --sbatch {name}=VALUE"
    return f"use --sbatch {name}" if name in ALONE else None
