"""Builds the commands that run torchrun and the ranks in an Apptainer container. Runs on login and compute nodes.

A program in the container sees the image, and these parts of the machine: the user's home, /tmp, /dev, the network, the
environment except PATH and LD_LIBRARY_PATH, and the processes. So the agents see and signal the ranks as usual.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path


def find_engine() -> str | None:
    """Return the path of apptainer, or of singularity, which has the same commands; None if neither is on the PATH."""
    return next(filter(None, map(shutil.which, ("apptainer", "singularity"))), None)


def inside(
    engine: str, image: Path, program: Sequence[str], mounts: Iterable[Path] = (), directory: Path = Path("/")
) -> list[str]:
    """Return the command line that runs a program in a container of an image: a .sif file or an unpacked directory.

    A program without a directory in its name is looked up in the image. `mounts` appear there at the same paths.
    """
    return [
        engine, "--quiet", "exec",
        *(f"--mount=type=bind,source={path},destination={path}" for path in mounts),
        f"--pwd={directory}",
        # Python must not mix the packages of the image with those in this machine's ~/.local.
        "--env=PYTHONNOUSERSITE=1",
        *(["--nv"] if Path("/dev/nvidiactl").exists() else []),
        str(image), *program,
    ]  # fmt: skip
