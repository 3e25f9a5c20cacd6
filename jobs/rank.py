"""Once per rank, before its program: send its output to its own log, then become the program.

Runs as a script, with nothing but the standard library, so that a user's program needs nothing of ours on its path:
`rank.py LOG_DIR PROGRAM ARGS...`. torchrun's own log files are numbered by local rank and restart; people look for
the rank.
"""

import os
import sys


def main(log_dir: str, *program: str) -> None:
    """Redirect and exec; the process id stays the one that torchrun watches."""
    path = os.path.join(log_dir, f"rank-{int(os.environ['RANK']):02d}.log")  # noqa: PTH118 - pathlib costs 10 ms a rank
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvp(program[0], program)  # noqa: S606 - a list, no shell


if __name__ == "__main__":
    main(*sys.argv[1:])
