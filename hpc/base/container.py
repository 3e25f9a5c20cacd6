"""Runs torchrun and the ranks in a container, with Apptainer. Used on the login node and on compute nodes.

In its container a program sees the image, and these parts of the machine: the user's home, /tmp, /dev, the processes,
the network, and the environment except PATH and LD_LIBRARY_PATH. So the agents see and signal the ranks as usual.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

_ENGINES = ("apptainer", "singularity")
_NVIDIA = Path("/dev/nvidiactl")


def find_engine() -> str | None:
    """Return the path of Apptainer here, or of Singularity, which has the same commands; None if neither is on PATH."""
    return next(filter(None, map(shutil.which, _ENGINES)), None)


def inside(
    engine: str, image: Path, program: Sequence[str], mounts: Iterable[Path] = (), directory: Path = Path("/")
) -> list[str]:
    """Return the command line that runs a program in a container of an image.

    Args:
        engine: `find_engine()`.
        image: a .sif file, or a directory.
        program: its command line; names are looked up in the image.
        mounts: further directories of this machine, which the program finds at the same place.
        directory: the directory in which it starts.
    """
    return [
        engine, "--quiet", "exec",
        *(f"--mount=type=bind,source={path},destination={path}" for path in mounts),
        f"--pwd={directory}",
        # The packages of the image must not be mixed with those in this machine's ~/.local.
        "--env=PYTHONNOUSERSITE=1",
        *(["--nv"] if _NVIDIA.exists() else []),
        str(image), *program,
    ]  # fmt: skip
