"""What the tests of environments share: real venvs, with a torch of a few lines in them, or with the real one."""

import compileall
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from hpc.sources.python_environment import PythonEnvironment
from hpc.submissions.user_python.environment_archive import find_or_make

ROOT = Path(__file__).parents[2]
SITE = f"lib/python3.{sys.version_info.minor}/site-packages"
BASE = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")


def make_venv(path: Path, torch: str = "") -> Path:
    """A venv that finds our own dependencies in this one, and its own torch before ours.

    Args:
        path: where.
        torch: the source of its torch.
    """
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(path)], check=True)
    (path / ".gitignore").unlink(missing_ok=True)  # Python 3.13 writes one, which is no part of the environment
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
    return PythonEnvironment(prefix=venv, python=python)


def pack(venv: Path, runs_dir: Path) -> Path:
    """Its archive."""
    return find_or_make(described(venv), runs_dir)


def make_torch_venv(path: Path) -> Path:
    """A venv in which this one's torch and torch's own dependencies can be imported, and nothing else: no numpy."""
    return _make_venv_of(path, ["torch"])


def make_light_venv(path: Path) -> Path:
    """A venv with the dependencies of the launcher alone, as `pip install torchrelay` makes it, and its `hpc`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = map(Requirement, project["dependencies"])
    _make_venv_of(path, [each.name for each in required if each.marker is None or each.marker.evaluate()])
    (path / SITE / "ours.pth").write_text(f"{ROOT}\n{ROOT / 'training' / 'relay'}\n")
    command = path / "bin" / "hpc"
    command.write_text(f"#!{path}/bin/python\nimport sys\nfrom hpc.__main__ import main\nsys.exit(main())\n")
    command.chmod(0o755)
    return path


def _make_venv_of(path: Path, needed: list[str]) -> Path:
    """A venv in which these packages of this one, and what they need, can be imported, and nothing else."""
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(path)], check=True)
    known = set[str]()
    while needed:
        name = needed.pop()
        if name in known:
            continue
        known.add(name)
        installed = metadata.distribution(name)
        required = map(Requirement, installed.requires or ())
        needed += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            link = path / SITE / top
            if not link.exists():  # several packages are in the directory nvidia
                link.symlink_to(Path(sysconfig.get_path("purelib"), top))
    return path
