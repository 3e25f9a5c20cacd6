"""Where the running testbed's slurm.conf is. Runs on the login node; reads files only."""

from pathlib import Path

STATE_DIRECTORY = Path("/run/torchrelay-testbed")


def running_slurm_conf() -> Path | None:
    """The slurm.conf of the running testbed, for SLURM_CONF; None if none is up.

    Costs two small reads, needs no root and runs no command. A killed slurmctld and what a reboot left count as
    not up: the recorded process must be a slurmctld, and no zombie, which lasts until its parent looks.
    """
    try:
        pid = int((STATE_DIRECTORY / "run" / "slurmctld.pid").read_text())
        _, name, state, *_ = Path(f"/proc/{pid}/stat").read_text().split()
    except (OSError, ValueError):
        return None
    slurm_conf = STATE_DIRECTORY / "slurm.conf"
    return slurm_conf if name == "(slurmctld)" and state != "Z" and slurm_conf.exists() else None
