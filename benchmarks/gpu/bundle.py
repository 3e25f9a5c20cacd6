"""`make gpu-bundle`: what `make gpu` needs beside torch, in a directory to bring to a machine without a network.

Pure Python packages, for any version of Python, and Fashion-MNIST: 32 MB.
"""

import shutil
import sys
from importlib.metadata import files
from pathlib import Path

from training.config.dataset_layout import FASHION_MNIST, resolve_data

# Distributions with the modules of `__main__.BUNDLED`, and what those import.
PACKAGES = ("tyro", "docstring-parser", "typeguard", "platformdirs", "submitit", "cloudpickle", "typing-extensions")


def main(directory: Path) -> None:
    """Fill the directory."""
    for package in PACKAGES:
        for file in files(package) or ():
            # Scripts lie outside, compiled modules are of one version of Python.
            if ".." not in file.parts and file.suffix != ".pyc":
                target = directory / "packages" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), target)
    shutil.copytree(resolve_data(FASHION_MNIST), directory / FASHION_MNIST, dirs_exist_ok=True)
    print(f"{directory}: type make gpu GPU_BUNDLE={directory} there")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
