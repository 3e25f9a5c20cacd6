"""Starts torchrun before its round is known: it imports torch while the nodes meet, or while other ranks train.

Runs on compute nodes. The waiting torchrun has imported what its ranks need. It gets its arguments and environment from
the agent, and is of no use if its round needs another interpreter or another environment.
"""

from collections.abc import Mapping
from pathlib import Path

from hpc.base.environment import DATA
from jobs.ranks.slurm_variables import NODE_LISTS
from jobs.ranks.torchrun import Torchrun, order

# Nothing reads these variables during the imports.
_LATE = frozenset({DATA, "GLOO_SOCKET_IFNAME", *NODE_LISTS})
# What a pipe usually holds, less room for what changes until the round.
_MAX_BYTES = 2**16 - 2**12


class Standby:
    """At most one torchrun that waits for its round."""

    def __init__(self) -> None:
        self._torchrun: Torchrun | None = None
        self._start: object = None

    def prepare(self, argv: list[str], environment: Mapping[str, str], directory: Path) -> None:
        """Start a torchrun that waits, for a command line and an environment like these. Raises OSError."""
        self.close()
        if len(order(argv, environment)) > _MAX_BYTES:
            return
        self._torchrun, self._start = Torchrun(argv, environment, directory, waits=True), _start(argv, environment)

    def take(self, argv: list[str], environment: Mapping[str, str]) -> Torchrun | None:
        """Start the round in the torchrun that waits. Returns None if there is none, or if it does not fit."""
        torchrun, self._torchrun = self._torchrun, None
        if torchrun is None:
            return None
        if self._start == _start(argv, environment) and torchrun.begin(argv, environment):
            return torchrun
        torchrun.kill()
        return None

    def close(self) -> None:
        """End the torchrun that waits, if there is one."""
        torchrun, self._torchrun = self._torchrun, None
        if torchrun is not None:
            torchrun.kill()


def _start(argv: list[str], environment: Mapping[str, str]) -> object:
    """Return what cannot be changed after the imports: the interpreter, and the variables that modules may read."""
    return argv[0], {name: value for name, value in environment.items() if name not in _LATE}
