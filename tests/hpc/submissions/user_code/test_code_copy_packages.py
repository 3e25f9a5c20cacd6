"""The copy of our packages in a run: one archive, from which Python imports."""

import os
import py_compile
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.cluster import ROOT

from hpc.run.rundir import LIBRARY, RunDir
from hpc.submissions.user_code.code_copy import copy_packages


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with our packages."""
    for module in ("hpc/base/units.py", f"{LIBRARY}/torchrelay/rank_exchange.py"):
        py_compile.compile(str(ROOT / module))
    found = RunDir(tmp_path)
    copy_packages(found)
    return found


def test_run_has_our_packages_in_one_file_which_others_cannot_change(run: RunDir) -> None:
    with ZipFile(run.packages) as archive:
        names = {Path(name) for name in archive.namelist()}
    ours = {path.relative_to(ROOT) for package in ("hpc", "jobs", "training") for path in (ROOT / package).rglob("*")}
    sources = {path for path in names if path.suffix != ".pyc"}
    assert sources == {path for path in ours if (ROOT / path).is_file() and "__pycache__" not in path.parts}
    assert {path.name for path in run.packages.parent.iterdir()} == {"packages.zip", "SHA256SUMS"}
    assert not [path for path in run.path.rglob("*") if path.stat().st_mode & 0o022]


def test_nodes_need_not_compile_our_packages(run: RunDir) -> None:
    code = (
        "from hpc.base import units; print(units.__file__, units.__spec__.loader.get_code(units.__name__).co_filename)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(run.packages)}, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.decode().split() == [f"{run.packages}/hpc/base/units.pyc", "packages.zip/hpc/base/units.py"]


def test_traceback_of_the_library_has_the_lines_of_the_archive(run: RunDir, tmp_path: Path) -> None:
    """Python itself would print none, or those of the installed file, which may have changed."""
    script = tmp_path / "train.py"
    script.write_text("import torch, torchrelay\ntorchrelay.should_stop()\n")
    place = {"RANK": "0", "WORLD_SIZE": "2", "TORCHRELAY_RUN_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", str(run.packages / "jobs/ranks"), "own", "script", str(script)],
        env={**os.environ, **place, "PYTHONPATH": str(run.packages / LIBRARY)},
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    first = lines.index("Traceback (most recent call last):")
    assert lines[first + 1 : first + 3] == [
        f'  File "{script}", line 2, in <module>', "    torchrelay.should_stop()",
    ]  # fmt: skip
    frame = next(n for n, line in enumerate(lines) if f'"packages.zip/{LIBRARY}/torchrelay/rank_exchange.py"' in line)
    assert lines[frame + 1] == '    raise RuntimeError(f"{call} needs the other ranks: {fix}")'
    assert done.returncode == 1
