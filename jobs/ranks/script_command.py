"""The job kind `script`: the user's own torchrun script. Runs on compute nodes; pure.

The script finds what it needs in its environment: TORCHRELAY_RUN_DIR, TORCHRELAY_ATTEMPT and, with `--data`,
TORCHRELAY_DATA. It is told to save by SIGUSR2 or SIGTERM, and then to exit with 0.
"""

from collections.abc import Mapping
from pathlib import Path

from hpc.core.rundir import RunDir


def command(script: tuple[str, ...], run: RunDir, python: str) -> list[str]:
    """The script as it was submitted, from the snapshot."""
    return [python, "-u", str(run.code / script[0]), *script[1:]]


def preflight(run: RunDir, attempt: int, python: str) -> list[str]:
    """What looks whether the nodes can train, before the script runs on them for the first time."""
    return [python, "-u", "-P", "-m", "training.engine.preflight", str(run.path), str(attempt)]


def environment(base: Mapping[str, str], run: RunDir, attempt: int, data: Path | None) -> dict[str, str]:
    """The environment of the script's ranks: the user's modules on the path, ours not."""
    own = str(run.packages)
    path = [entry for entry in base.get("PYTHONPATH", "").split(":") if entry and entry != own]
    return {
        **base,
        "PYTHONPATH": ":".join([str(run.code), *path]),
        "TORCHRELAY_RUN_DIR": str(run.path),
        "TORCHRELAY_ATTEMPT": str(attempt),
        **({"TORCHRELAY_DATA": str(data)} if data else {}),
    }
