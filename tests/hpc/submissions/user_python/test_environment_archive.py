"""Packing an environment: real venvs, real archives, real kills."""

import json
import os
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest
from support.cluster import mounted_volume, tiny_data
from support.environments import BASE, ROOT, SITE, described, make_venv, pack, set_version
from support.events import script_spec
from support.staging_nodes import stage

from hpc.base.errors import TorchrelayError
from hpc.run.rundir import RunDir
from hpc.submissions.user_python import environment_archive
from hpc.submissions.user_python.environment_archive import DIRECTORY, find_or_make
from jobs.ranks.rank_environment import activated_environment


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return make_venv(tmp_path / "venv")


def unpacked(archive: Path, tmp_path: Path) -> Path:
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    return stage(archive, disk).path


def files(top: Path) -> dict[str, bytes]:
    found = (path for path in top.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(top)): path.read_bytes() for path in found}


def test_copy_has_every_file_and_every_link_inside(venv: Path, tmp_path: Path) -> None:
    (venv / SITE / "relative").symlink_to("torch/large.bin")
    (venv / SITE / "absolute").symlink_to(venv / SITE / "torch")
    copy = unpacked(pack(venv, tmp_path / "runs"), tmp_path)
    here, there = files(copy), files(venv)
    assert json.loads(here.pop("torchrelay-environment.json"))["links"][f"bin/{Path(BASE).name}"] == BASE
    assert here == there
    assert (copy / SITE / "relative").readlink() == Path("torch/large.bin")
    assert (copy / SITE / "absolute").readlink() == Path("torch")
    assert not os.path.lexists(copy / "bin" / Path(BASE).name)


def test_byte_code_is_that_of_the_original(venv: Path, tmp_path: Path) -> None:
    copy = unpacked(pack(venv, tmp_path / "runs"), tmp_path)
    (copy / "bin" / Path(BASE).name).symlink_to(BASE)
    [code] = (copy / SITE / "torch" / "__pycache__").iterdir()
    before = code.stat()
    subprocess.run([copy / "bin" / "python", "-c", "import torch"], check=True)
    assert (code.stat().st_ino, code.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "not compiled again"


def test_link_to_a_file_of_a_cache_is_packed_as_the_file(venv: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cached.py"
    cached.write_text("x = 1\n")
    (venv / SITE / "linked.py").symlink_to(cached)
    before = described(venv).fingerprint
    assert (unpacked(pack(venv, tmp_path / "runs"), tmp_path) / SITE / "linked.py").read_text() == "x = 1\n"
    cached.write_text("x = 22\n")
    assert described(venv).fingerprint != before


def test_other_environments_of_conda_are_not_packed(tmp_path: Path) -> None:
    for name in ("bin", "conda-meta", "ssl", "envs", "pkgs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    names = [member.name for member in described(tmp_path).members]
    assert names == ["bin/file", "conda-meta/file", "ssl/file"]


def test_fingerprint_changes_when_a_package_is_upgraded(venv: Path) -> None:
    before = described(venv).fingerprint
    (venv / SITE / "torch" / "__pycache__" / "other.cpython-311.pyc").write_bytes(b"byte code")
    assert described(venv).fingerprint == before
    set_version(venv, "9.10")
    assert described(venv).fingerprint != before


def test_archive_is_made_once(venv: Path, tmp_path: Path) -> None:
    first = pack(venv, tmp_path).stat()
    again = pack(venv, tmp_path).stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert again.st_mode & 0o777 == 0o600
    assert (tmp_path / DIRECTORY).stat().st_mode & 0o777 == 0o700


def left(runs_dir: Path) -> list[str]:
    return sorted(path.name for path in (runs_dir / DIRECTORY).iterdir())


def test_archive_of_a_faster_submission_stays(venv: Path, tmp_path: Path) -> None:
    archive = pack(venv, tmp_path)
    before = archive.stat().st_ino
    environment_archive._make(described(venv), archive)
    assert archive.stat().st_ino == before
    assert left(tmp_path) == [archive.name]


def test_unfinished_archives_are_removed_once_they_are_old(venv: Path, tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir(mode=0o700)
    old, new = (tmp_path / DIRECTORY / f".{name}.tar.zst.tmp" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    archive = pack(venv, tmp_path)
    assert left(tmp_path) == sorted([new.name, archive.name]), "another submission may still write the new one"


def test_environment_that_changes_while_it_is_packed_is_refused(venv: Path, tmp_path: Path) -> None:
    environment = described(venv)
    assert environment.members
    set_version(venv, "10.0")
    with pytest.raises(TorchrelayError, match="was changed while it was packed"):
        find_or_make(environment, tmp_path)
    assert left(tmp_path) == []


def test_full_disk_is_reported_and_leaves_nothing(venv: Path, tmp_path: Path) -> None:
    (venv / SITE / "torch" / "weights").write_bytes(os.urandom(3 * 2**20))
    with mounted_volume(tmp_path / "runs", "size=1m") as runs:
        with pytest.raises(TorchrelayError, match="No space left on device"):
            pack(venv, runs)
        assert left(runs) == []


def save(runs_dir: Path, name: str, archive: Path) -> RunDir:
    run = RunDir(runs_dir / name)
    run.path.mkdir()
    script_spec(name=name, cluster="local", stage_env=str(archive)).save(run)
    return run


def test_old_archives_that_no_run_needs_are_removed(venv: Path, tmp_path: Path) -> None:
    archives = []
    for version in ("1", "2", "3", "4"):
        set_version(venv, version)
        archives.append(pack(venv, tmp_path))
    unused, waiting, complete, recent = archives
    save(tmp_path, "waiting", waiting)
    run = save(tmp_path, "complete", complete)
    run.final.mkdir()
    run.final_result.write_text("{}")
    for archive in archives[:3]:
        os.utime(archive, (time.time() - 8 * 86400, archive.stat().st_mtime))
    set_version(venv, "5")
    current = pack(venv, tmp_path)
    assert left(tmp_path) == sorted(archive.name for archive in (waiting, recent, current))
    assert not unused.exists()


def submit_by(python: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [python, "-m", "hpc.submit", "--cluster=local", "--data=data", "--stage-env", "--dry-run"]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_system_python_is_refused(tmp_path: Path) -> None:
    tiny_data(tmp_path / "data", 10, 10)
    done = submit_by(BASE, tmp_path, PYTHONPATH=f"{ROOT}:{sysconfig.get_path('purelib')}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is the system's Python" in done.stderr
    assert "python -m venv" in done.stderr


def test_dry_run_packs_nothing_and_an_environment_without_torch_is_refused(venv: Path, tmp_path: Path) -> None:
    python = str(venv / "bin" / "python")
    tiny_data(tmp_path / "data", 10, 10)
    done = submit_by(python, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()
    (venv / SITE / "torch").rename(tmp_path / "torch")
    done = submit_by(python, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"torch is not in {venv}" in done.stderr


def test_copy_is_the_active_environment() -> None:
    base = {
        "PATH": "/home/me/bin:/shared/env/bin:/usr/bin", "LD_LIBRARY_PATH": "/shared/env/lib:/shared/envs",
        "VIRTUAL_ENV": "/shared/env", "PYTHONHOME": "/x", "HOME": "/home/me",
    }  # fmt: skip
    assert activated_environment(base, "/tmp/copy/bin/python", "/shared/env") == {
        "PATH": "/tmp/copy/bin:/home/me/bin:/usr/bin", "LD_LIBRARY_PATH": "/tmp/copy/lib:/shared/envs",
        "VIRTUAL_ENV": "/tmp/copy", "HOME": "/home/me",
    }  # fmt: skip
    of_conda = activated_environment({"CONDA_PREFIX": "/shared/env"}, "/tmp/copy/bin/python", "/shared/env")
    assert of_conda == {"PATH": "/tmp/copy/bin", "CONDA_PREFIX": "/tmp/copy"}
    assert activated_environment(base, "/shared/env/bin/python", "/shared/env") == base
