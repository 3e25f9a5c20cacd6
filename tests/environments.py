"""What the tests of the packed environment share: a real venv, small, with a torch of a few lines in it."""

import compileall
import subprocess
import sys
import sysconfig
from pathlib import Path

from hpc.staging.python_environment import PythonEnvironment
from hpc.submit.environment_archive import find_or_make

ROOT = Path(__file__).parents[1]
SITE = f"lib/python3.{sys.version_info.minor}/site-packages"
BASE = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")


def make_venv(path: Path, torch: str = "") -> Path:
    """A venv that finds our own dependencies in this one, and its own torch before ours.

    Args:
        path: where.
        torch: the source of its torch.
    """
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(path)], check=True)
    site = path / SITE
    (site / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(torch)
    set_version(path, "9.9")
    (site / "torch" / "large.bin").write_bytes(bytes(range(256)) * 4096)
    compileall.compile_dir(site / "torch", quiet=2)
    tool = path / "bin" / "tool"
    tool.write_text(f"#!{path}/bin/python\nimport sys\nprint(sys.prefix, sys.argv[1:])\n")
    tool.chmod(0o755)
    return path


def set_version(venv: Path, version: str) -> None:
    """Install another version of its torch."""
    information = venv / SITE / "torch-9.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


def described(venv: Path, python: str = "bin/python") -> PythonEnvironment:
    """The environment as `hpc` would find it if it ran there."""
    return PythonEnvironment(prefix=venv, python=python, torch=f"{SITE}/torch/__init__.py", torch_version="9.9")


def pack(venv: Path, runs_dir: Path) -> Path:
    """Its archive."""
    return find_or_make(described(venv), runs_dir)
