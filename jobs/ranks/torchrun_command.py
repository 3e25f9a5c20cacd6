"""The rendezvous of a round's nodes, and torchrun's command line and environment for it. Runs on compute nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The coordinator, which knows all ranks and steps, decides how often ranks restart (jobs.control.root_failure).
MAX_RESTARTS = 1_000_000
_ROOT = Path(__file__).parents[2]
# Python starts both by a path, because a user's PYTHONPATH must not replace them. They are directories with a
# `__main__.py`: unlike a file, Python also finds them in an archive.
TORCHRUN, PROCESS_WRAPPER = _ROOT / "training" / "runtime", _ROOT / "jobs" / "ranks"
"""Paths of our torchrun and of the process wrapper."""
NUM_START_WORDS = 3
"""Number of the first words of torchrun's command line with which it starts and waits for the others."""
STANDBY = "standby"
"""Word after the first ones that makes torchrun wait. Further words only make room for its name (`name_process`)."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rendezvous of one round, as one of its nodes sees it."""

    run: str
    attempt: int
    secret: str
    round: int
    num_nodes: int
    host: str
    """Address of the first node, to which the others report (training.runtime.node_rendezvous)."""
    port: int
    node: int
    """This node's index among the members of the round."""
    ports: Sequence[int] = ()
    """Ports on one of which the ranks' store listens; if empty, the kernel chooses the port."""

    @property
    def id(self) -> str:
        """Public name of the rendezvous. Only the secret excludes a process of an earlier attempt on the same port."""
        return f"{self.run}-{self.attempt}-{self.round}"


def torchrun_argv(
    rendezvous: Rendezvous, ranks: int, address: str, python: str, program: list[str], max_restarts: int = MAX_RESTARTS
) -> list[str]:
    """Return the command line of this node's torchrun, which runs `program` as each of its `ranks` ranks. Pure.

    torchrun runs the process wrapper in forks of itself, and executes any other program.
    """
    host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
    ports = f",ports={rendezvous.ports[0]}-{rendezvous.ports[-1]}" if rendezvous.ports else ""
    return [
        python, "-P", str(TORCHRUN),
        f"--nnodes={rendezvous.num_nodes}",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={max_restarts}",
        "--rdzv-backend=torchrelay",
        f"--rdzv-endpoint={host}:{rendezvous.port}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf=rank={rendezvous.node}{ports}",
        f"--local-addr={address}",
        *(("--run-path", "--start-method=fork") if program[0] == str(PROCESS_WRAPPER) else ("--no-python",)),
        # Without `--`, torchrun refuses a script's `--n 4` as an abbreviation of several flags of its own.
        "--",
        # For torchrun, `$$` stands for `$`.
        program[0], *(argument.replace("$", "$$") for argument in program[1:]),
    ]  # fmt: skip
