"""Causes the failures of a drill on one compute node. Runs on compute nodes.

`python -m hpc.cluster.drill_faults RUN_DIR kill|stop RANK` acts on one rank; `RUN_DIR kill-all` acts on the agent
and its descendants. Both print the ids of these processes; an empty line means that this node has none.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from hpc.base.kernel import children
from hpc.run.nodedir import node_dirs

_SIGNALS = {"kill": signal.SIGKILL, "kill-all": signal.SIGKILL, "stop": signal.SIGSTOP}


def main(argv: list[str]) -> int:
    """Apply the action in `argv` to the run's processes on this node, and print their ids."""
    run, action, *ranks = argv
    pids = agent_tree(Path(run)) if action == "kill-all" else rank_pids(Path(run), int(ranks[0]))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNALS[action])
    print(*pids)
    return 0


def rank_pids(run: Path, rank: int) -> list[int]:
    """Return a list with the process id of a rank; an empty list if the rank is not on this node."""
    found = []
    for path in (path for node in node_dirs(run) for path in node.running_ranks()):
        with suppress(FileNotFoundError, ValueError):
            wrapper = json.loads(path.read_text())
            # Several processes may have been this rank: the rendezvous after a lost node assigns the ranks again.
            if wrapper["rank"] == rank and (own := children(wrapper["pid"])):
                found.append((wrapper["started_at"], own[0]))
    return [max(found)[1]] if found else []


def agent_tree(run: Path) -> list[int]:
    """Return the process ids of the run's agent on this node and of all its descendants."""
    tree = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_text(errors="replace").split("\0")
            # The batch script's srun has the agent's command line too, but does not fail with the node.
            if {"jobs.agent", os.fspath(run)} <= set(command) and Path(command[0]).name != "srun":
                tree.append(int(path.parent.name))
    for pid in tree:  # the loop extends this list, and so also visits the children
        tree += [child for child in children(pid) if child not in tree]
    return tree


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
