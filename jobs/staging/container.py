"""The container that torchrun and the ranks run in, with Apptainer. Runs on the login node and on compute nodes.

Apptainer gives a program the user's home, /tmp and /dev of the machine beside the image, its processes and network, and
the environment but for PATH and LD_LIBRARY_PATH. So the agents see and signal the ranks as if there were no container.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

_ENGINES = ("apptainer", "singularity")
_NVIDIA = Path("/dev/nvidiactl")


def find_engine() -> str | None:
    """Apptainer here, or Singularity, which has the same commands; None: neither is on PATH."""
    return next(filter(None, map(shutil.which, _ENGINES)), None)


def inside(
    engine: str, image: Path, program: Sequence[str], mounts: Iterable[Path] = (), directory: Path = Path("/")
) -> list[str]:
    """The command line that runs a program in a container of an image.

    Args:
        engine: `find_engine()`.
        image: a .sif file, or a directory.
        program: its command line; names are looked up in the image.
        mounts: directories of this machine that it gets at the same place, beside those that it always gets.
        directory: where it starts.
    """
    return [
        engine, "--quiet", "exec",
        *(f"--mount=type=bind,source={path},destination={path}" for path in mounts),
        f"--pwd={directory}",
        # What the image has must not be mixed with ~/.local of this machine.
        "--env=PYTHONNOUSERSITE=1",
        *(["--nv"] if _NVIDIA.exists() else []),
        str(image), *program,
    ]  # fmt: skip
