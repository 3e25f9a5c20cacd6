"""A drill's part on one compute node: do to a process of the run what a failure would. Runs on compute nodes.

`python -m hpc.drill.node_faults RUN_DIR kill|stop|full RANK` or `RUN_DIR kill-all`; prints the processes that it
hit, none if the rank is not on this node.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpc.core.kernel import children, start_time
from hpc.core.nodedir import node_dirs

_FULL_SECONDS = 10.0
# More than a heartbeat and the head of a log, less than any model.
_FULL_BYTES = 64 * 1024


def main(argv: list[str]) -> int:
    """Act on this node, if there is something to act on."""
    run, action, *ranks = argv
    pids = agent_tree(Path(run)) if action == "kill-all" else rank_pids(Path(run), int(ranks[0]))
    for pid in pids:
        with suppress(ProcessLookupError):
            _ACTIONS[action](pid)
    print(*pids)
    return 0


def rank_pids(run: Path, rank: int) -> list[int]:
    """The process of a rank, if it runs on this node, by its heartbeat."""
    found = []
    for path in (path for node in node_dirs(run) for path in node.heartbeat(0).parent.glob("local-*")):
        with suppress(ValueError):
            beat = json.loads(path.read_text())
            # A rank may have had its place here before the nodes that are left took new ones.
            if beat["rank"] == rank and start_time(beat["pid"]) is not None:
                found.append((beat["time"], beat["pid"]))
    return [max(found)[1]] if found else []


def agent_tree(run: Path) -> list[int]:
    """This node's agent of the run, and all processes that come from it."""
    commands = {int(path.parent.name): _arguments(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    tree = [pid for pid, command in commands.items() if _is_agent(command, os.fspath(run))]
    for pid in tree:  # grows while it is walked
        tree += [child for child in children(pid) if child not in tree]
    return tree


def _is_agent(command: list[str], run: str) -> bool:
    # The srun of the batch script has the agent's command line too, and is not part of the node that fails.
    return {"jobs.agent", run} <= set(command) and Path(command[0]).name != "srun"


def _arguments(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(errors="replace").split("\0")
    return []


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def _full(pid: int) -> None:
    """Let a process write no large file for a while: as on a full disk, but for its own files alone."""
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, limits[1]))
    try:
        time.sleep(_FULL_SECONDS)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


_ACTIONS: dict[str, Callable[[int], None]] = {"kill": _kill, "kill-all": _kill, "stop": _stop, "full": _full}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
