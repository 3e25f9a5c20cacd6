"""What a run gets of the user's code and of ours, and what of it git sees."""

import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import ROOT, Site
from support.fake_slurm import queueing_site

from hpc.base.errors import UserError
from hpc.run.rundir import RunDir
from hpc.submit.code_copy import UserCode, copy_code, find_code


def git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Its script imports modules that git does not track, one of which is ignored, and one that imports the next."""
    files = {
        "src/my.py": "import json, tracked, absent\nfrom package.inner import work\ndef later():\n    import ignored\n",
        "src/tracked.py": "import top.deep\n",
        "src/ignored.py": "",
        "src/unused.py": "",
        "src/package/__init__.py": "from . import sibling\n",
        "src/package/inner.py": "from .. import beyond\nfrom .sibling import name\n",
        "src/package/sibling.py": "not Python\n",
        "top/deep.py": "",
        "conf/a.yaml": "",
        "conf/more/b.yaml": "",
        ".gitignore": "ignored.py\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "src/my.py", "src/tracked.py", ".gitignore")
    return tmp_path


def copied(path: Path, code: UserCode) -> RunDir:
    run = RunDir(path)
    run.path.mkdir(parents=True)
    copy_code(run, code)
    return run


TRACKED = {".gitignore", "src/my.py", "src/tracked.py"}
IMPORTED = {
    "src/ignored.py", "src/package/__init__.py", "src/package/inner.py", "src/package/sibling.py", "top/deep.py",
}  # fmt: skip


def test_a_script_and_what_it_imports_are_copied_whether_git_tracks_them_or_not(repository: Path) -> None:
    def found(*script: str, below: str = ".") -> set[str]:
        code = find_code(repository / below, script)
        assert script[:1] != ("-m",) or code.script == script
        return set(code.names)

    assert found("src/my.py") == found("my.py", below="src") == {*TRACKED, *IMPORTED}
    for name in ("my", "src.my"):
        assert found("-m", name, "x") == found("-m", name, "x", below="src") == {*TRACKED, *IMPORTED}
    assert found() == TRACKED, "our trainer imports none of them"
    assert found("-m", "json.tool") == TRACKED, "it is installed"
    assert set(find_code(repository, ("-m", "absent.module"), elsewhere=True).names) == TRACKED
    git(repository, "rm", "-q", "--cached", "src/my.py")
    assert found("src/my.py") == {*TRACKED, *IMPORTED}
    shutil.rmtree(repository / ".git")
    alone = find_code(repository / "src", ("my.py",))
    assert alone.root == repository / "src"
    assert set(alone.names) == {name.removeprefix("src/") for name in {*TRACKED, *IMPORTED} if name.startswith("src/")}


def test_the_revision_of_a_run_with_untracked_files_is_dirty(repository: Path, tmp_path: Path) -> None:
    git(repository, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    commit = git(repository, "rev-parse", "HEAD").strip()
    for name, script, revision in (("ours", (), commit), ("untracked", ("src/my.py",), f"{commit}+dirty")):
        run = copied(tmp_path / "runs" / name, find_code(repository, script))
        assert run.revision.read_text() == f"{revision}\n"


def test_included_files_are_copied(repository: Path) -> None:
    code = find_code(repository / "src", ("my.py",), ("../conf/**/*.yaml", "unused.py"))
    assert (code.working_directory, code.script) == ("src", ("my.py",))
    run = copied(repository / "runs" / "run", code)
    names = {str(path.relative_to(run.code)) for path in run.code.rglob("*") if path.is_file()}
    own = {*TRACKED, *IMPORTED, "conf/a.yaml", "conf/more/b.yaml", "src/unused.py"}
    assert {name for name in names if not name.startswith(".torchrelay/")} == own


def test_script_keeps_its_path_from_the_working_directory(repository: Path) -> None:
    here = repository / "conf"
    for given in ("../src/my.py", str(repository / "src/my.py")):
        code = find_code(here, (given, "x"))
        assert (code.working_directory, code.script) == ("conf", ("../src/my.py", "x"))
        assert set(code.names) == {*TRACKED, *IMPORTED}
    run = copied(repository / "runs" / "run", code)
    assert (run.code / "conf").is_dir(), "though git tracks nothing in it"
    assert find_code(here, ()).working_directory == ".", "our trainer does not look there"


def test_module_is_found_from_the_working_directory(repository: Path) -> None:
    git(repository, "add", "src/package")
    (repository / "package").mkdir()
    (repository / "package" / "inner.py").touch()
    names = find_code(repository / "src", ("-m", "package.inner")).names
    assert "src/package/inner.py" in names
    assert "package/inner.py" not in names


def test_neither_runs_nor_what_git_keeps_is_code(repository: Path) -> None:
    (repository / "runs" / "old").mkdir(parents=True)
    (repository / "runs" / "old" / "spec.json").touch()
    names = find_code(repository, (), (".",)).names
    assert "top/deep.py" in names
    assert not [name for name in names if name.startswith((".git/", "runs/"))]


@pytest.mark.parametrize(
    ("script", "pattern", "message"),
    [
        (("src/my.py",), "nothing*", r"--include nothing\*: there is no such file in "),
        (("src/my.py",), "/etc/hostname", "--include /etc/hostname: /etc/hostname is not below .*: copy it to that"),
        (("/etc/hostname",), "conf", "is not below .*: move it there, or --in-place to run it where it is"),
        (("-m", "absent.a"), "conf", "module 'absent.a' is neither below .* or .*/src nor installed: give its name"),
    ],
)
def test_code_that_the_run_would_lack_is_refused(
    repository: Path, script: tuple[str, ...], pattern: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        find_code(repository, script, (pattern,))


def test_run_has_our_packages_and_others_cannot_change_them(tmp_path: Path, repository: Path) -> None:
    run = copied(tmp_path / "run", find_code(repository, ("src/my.py",)))
    names = {path.relative_to(run.packages) for path in run.packages.rglob("*") if path.is_file()} - {Path("revision")}
    ours = {path.relative_to(ROOT) for package in ("hpc", "jobs", "training") for path in (ROOT / package).rglob("*")}
    sources = {path for path in names if path.suffix != ".pyc"}
    assert sources == {path for path in ours if (ROOT / path).is_file() and "__pycache__" not in path.parts}
    assert not [path for path in run.packages.rglob("*") if path.stat().st_mode & 0o022]


def test_nodes_need_not_compile_our_packages(tmp_path: Path, repository: Path) -> None:
    py_compile.compile(str(ROOT / "hpc/base/units.py"))
    run = copied(tmp_path / "run", find_code(repository, ("src/my.py",)))
    command = [sys.executable, "-v", "-P", "-c", "import hpc.base.units"]
    done = subprocess.run(command, env={"PYTHONPATH": str(run.packages)}, capture_output=True, text=True, check=True)
    source = run.packages / "hpc/base/units.py"
    assert re.search(rf"{source.parent}/__pycache__/units.*pyc matches {source}", done.stderr)


@pytest.mark.parametrize("ignored", [False, True])
def test_runs_do_not_show_in_git_status(repository: Path, ignored: bool, shared: Path) -> None:
    here = Site(shutil.copytree(repository, shared / "repository"), "/nonexistent")
    if ignored:
        (here.path / ".gitignore").write_text("ignored.py\nruns/\n")
    before = git(here.path, "status", "--short")
    _, slurm = queueing_site(shared)
    here.submit("--synthetic", "--batch-size=8", **slurm)
    assert git(here.path, "status", "--short") == before
    assert (here.path / "runs" / ".gitignore").exists() != ignored


def test_submission_says_where_the_script_starts(repository: Path) -> None:
    words = ("submit", "--cluster=local", "--dry-run", "--name=run")
    done = Site(repository, "/nonexistent").hpc(*words, "--", "src/my.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"hpc submit: src/my.py starts in {repository}/runs/run/code\n"
    refused = Site(repository, "/nonexistent").hpc(*words, "--in-place", "--include=conf", "--", "src/my.py")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
