"""`make gpu-bundle`: what `make gpu` needs beside torch, in a directory to bring to a machine without a network.

    python -m benchmarks.gpu.bundle DIRECTORY [--python-version 3.12]

Packages for the Python of that machine, whose processor must be of this machine's kind, and Fashion-MNIST: 58 MB.
"""

import shutil
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from platform import python_version

from uv import find_uv_bin

from benchmarks.gpu.__main__ import BUNDLED, REPOSITORY
from training.config.dataset_layout import FASHION_MNIST, resolve_data

# What the packages import, and what an older Python there lacks. Distributions have the names of their modules.
IMPORTED = ("typing-extensions", "backports.zstd; python_version < '3.14'")


def main() -> None:
    """Fill the directory."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python-version", default=python_version(), help="of the Python there (default: this one's)")
    options = parser.parse_args()
    fill(options.directory, options.python_version)
    print(f"{options.directory}: type make gpu GPU_BUNDLE={options.directory} there")


def fill(directory: Path, version: str) -> None:
    """Put the packages for a version of Python, and the data set there."""
    command = [find_uv_bin(), "pip", "install", "--quiet", f"--target={directory / 'packages'}", "--no-deps"]
    command += [
        f"--constraint={REPOSITORY / 'requirements.lock'}",
        f"--python-version={version}",
        "--only-binary=:all:",
    ]
    subprocess.run([*command, *BUNDLED, *IMPORTED], check=True)
    shutil.copytree(resolve_data(FASHION_MNIST), directory / FASHION_MNIST, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
