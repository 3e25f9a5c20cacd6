"""The copy of our packages in a run."""

import py_compile
import re
import subprocess
import sys
from pathlib import Path

from support.cluster import ROOT

from hpc.run.rundir import RunDir
from hpc.submissions.user_code.package_copy import copy_packages


def test_run_has_our_packages_and_others_cannot_change_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    copy_packages(run)
    names = {path.relative_to(run.packages) for path in run.packages.rglob("*") if path.is_file()}
    names.remove(Path("SHA256SUMS"))
    ours = {path.relative_to(ROOT) for package in ("hpc", "jobs", "training") for path in (ROOT / package).rglob("*")}
    sources = {path for path in names if path.suffix != ".pyc"}
    assert sources == {path for path in ours if (ROOT / path).is_file() and "__pycache__" not in path.parts}
    assert not [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o022]


def test_nodes_need_not_compile_our_packages(tmp_path: Path) -> None:
    py_compile.compile(str(ROOT / "hpc/base/units.py"))
    run = RunDir(tmp_path)
    copy_packages(run)
    command = [sys.executable, "-v", "-P", "-c", "import hpc.base.units"]
    done = subprocess.run(command, env={"PYTHONPATH": str(run.packages)}, capture_output=True, text=True, check=True)
    source = run.packages / "hpc/base/units.py"
    assert re.search(rf"{source.parent}/__pycache__/units.*pyc matches {source}", done.stderr)
