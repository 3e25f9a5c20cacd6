"""What a run has of the user's directory: copies of the code, links to all else, as torchrun would find them there."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import Site
from support.fake_slurm import queueing_site

from hpc.base.errors import UserError
from hpc.run.code_files import OUR_DIRECTORY
from hpc.run.rundir import RunDir
from hpc.run.spec_file import LIBRARY_PATH
from hpc.submissions.user_code.code_copy import copy_code
from hpc.submissions.user_code.own_code import UserCode, find_code
from hpc.submissions.user_code.script_hints import warnings_of_code


def git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Its script imports modules that git does not track, one of which is ignored, and one that imports the next."""
    files = {
        "src/my.py": "import json, tracked, absent\nfrom package.inner import work\ndef later():\n    import ignored\n",
        "src/tracked.py": "import top.deep\n",
        "src/ignored.py": "",
        "src/package/__init__.py": "from . import sibling\n",
        "src/package/inner.py": "from .. import beyond\nfrom .sibling import name\n",
        "src/package/sibling.py": "not Python\n",
        "src/package/ext.so": "",
        "top/deep.py": "",
        "conf/more/b.yaml": "",
        "data/a.csv": "",
        "data/b/c.json": "{}",
        "weights.pt": "",
        ".venv/pyvenv.cfg": "",
        "src/__pycache__/x.pyc": "",
        ".gitignore": "ignored.py\ndata/\n*.so\n*.pt\n.venv\n",
    }
    write(tmp_path / "project", files)
    git(tmp_path / "project", "init", "-q")
    git(tmp_path / "project", "add", "src/my.py", "src/tracked.py", ".gitignore")
    return tmp_path / "project"


def copied(path: Path, code: UserCode) -> RunDir:
    run = RunDir(path)
    run.path.mkdir(parents=True)
    copy_code(run, code)
    return run


TRACKED = {".gitignore", "src/my.py", "src/tracked.py"}
IMPORTED = {
    "src/ignored.py", "src/package/__init__.py", "src/package/inner.py", "src/package/sibling.py", "top/deep.py",
}  # fmt: skip
LINKED = {"data", "weights.pt", "src/package/ext.so"}


def test_code_is_copied_and_everything_else_is_a_link(repository: Path, tmp_path: Path) -> None:
    for here, script in (
        (repository, "src/my.py"),
        (repository / "src", "my.py"),
        (repository / "src", "../src/my.py"),
    ):
        code = find_code(here, (script, "x"))
        assert (code.root, code.script[1]) == (repository, "x")
        assert set(code.layout.copies) == {*TRACKED, *IMPORTED, "conf/more/b.yaml"}
        assert set(code.layout.links) == LINKED, "neither git's records, environments nor byte code"
    run = copied(tmp_path / "run", code)
    for name in ("data/b/c.json", "src/package/ext.so", "src/my.py"):
        assert (run.code / name).read_bytes() == (repository / name).read_bytes()
    (repository / "src/my.py").write_text("edited")
    assert (run.code / "src/my.py").read_text() != "edited"
    assert (run.code / code.working_directory).is_dir()


def test_a_module_is_found_as_python_finds_it(repository: Path) -> None:
    names = {*TRACKED, *IMPORTED, "conf/more/b.yaml"}
    for here, name in (
        (repository, "my"),
        (repository, "src.my"),
        (repository / "src", "my"),
        (repository / "conf", "my"),
    ):
        code = find_code(here, ("-m", name))
        assert code.script == ("-m", name)
        assert set(code.layout.copies) == names
        assert code.program.import_path == ("{code}", "{code}/src", LIBRARY_PATH)
    assert find_code(repository, ("-m", "json.tool")).text.files == frozenset(), "it is installed"
    assert find_code(repository, ("-m", "absent.module"), elsewhere=True).script == ("-m", "absent.module")
    with pytest.raises(
        UserError, match=r"module 'absent.a' is neither below .* or .*/src nor installed: give its name"
    ):
        find_code(repository, ("-m", "absent.a"))


def test_our_trainer_needs_nothing_of_the_directory(repository: Path, tmp_path: Path) -> None:
    git(repository, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    run = copied(tmp_path / "run", find_code(repository, ()))
    assert [path.name for path in run.code.iterdir()] == [OUR_DIRECTORY]
    assert run.revision.read_text().strip() == git(repository, "rev-parse", "HEAD").strip()


def test_the_revision_of_a_run_with_an_untracked_module_is_dirty(repository: Path) -> None:
    git(repository, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert find_code(repository, ("src/my.py",)).revision == f"{commit}+dirty"
    write(repository, {"src/alone.py": ""})
    git(repository, "add", "src/alone.py")
    git(repository, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "second")
    assert find_code(repository, ("src/alone.py",)).revision == git(repository, "rev-parse", "HEAD").strip()


def test_links_in_the_directory_lead_where_they_led(tmp_path: Path) -> None:
    here, outside = tmp_path / "project", tmp_path / "elsewhere"
    write(outside, {"data/a.csv": "a", "base.yaml": "first"})
    write(here, {"train.py": "", "real/extra.txt": "x", "data/big.bin": ""})
    for name, target in (
        ("link", "real"), ("far", str(outside / "data")), ("base.yaml", "../elsewhere/base.yaml"), ("gone", "nowhere"),
    ):  # fmt: skip
        (here / name).symlink_to(target)
    for is_tracked in (False, True):
        if is_tracked:
            git(here, "init", "-q")
            git(here, "add", ".")
        run = copied(tmp_path / f"run-{is_tracked}", find_code(here, ("train.py",)))
        assert (run.code / "link/extra.txt").read_text() == "x"
        assert (run.code / "far/a.csv").read_text() == "a"
        assert (run.code / "gone").is_symlink()
    (outside / "base.yaml").write_text("edited")
    (here / "real/extra.txt").write_text("edited")
    assert [(run.code / name).read_text() for name in ("base.yaml", "link/extra.txt")] == ["first", "x"]


def test_a_submodule_and_a_repository_within_have_their_files(tmp_path: Path) -> None:
    library, here = tmp_path / "library", tmp_path / "project"
    write(library, {"lib/__init__.py": "", "lib/table.csv": "1"})
    git(library, "init", "-q")
    git(library, "add", ".")
    git(library, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    write(here, {"train.py": "import vendor.lib\n"})
    git(here, "init", "-q")
    git(here, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "vendor")
    git(here, "clone", "-q", str(library), "nested")
    git(here, "add", "train.py")
    run = copied(tmp_path / "run", find_code(here, ("train.py",)))
    for name in ("vendor", "nested"):
        assert (run.code / name / "lib/table.csv").read_text() == "1"
    assert not (run.code / "vendor/lib/__init__.py").is_symlink(), "the script imports it"


def refuse(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")


def corrupt(here: Path, _: pytest.MonkeyPatch) -> None:
    (here / ".git/index").write_bytes(b"no index")


def remove(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (refuse, "detected dubious ownership.* type git config --global --add safe.directory"),
        (corrupt, "index file"),
        (remove, r"git cannot be run \(No such file"),
    ],
)
def test_a_repository_that_git_does_not_read_is_told_and_whole(
    fail: Callable[[Path, pytest.MonkeyPatch], None], message: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(repository, monkeypatch)
    code = find_code(repository / "src", ("my.py",))
    assert code.root == repository, "imports from its top still work"
    assert {"src/my.py", "src/ignored.py", "top/deep.py", "conf/more/b.yaml"} <= set(code.layout.copies)
    assert {"data", "weights.pt", ".gitignore"} <= set(code.layout.links)
    (warning,) = warnings_of_code(code, on_cluster=False)
    assert re.search(message, warning)


UPWARD = {
    "a relative entry of sys.path": 'import sys\nsys.path.insert(0, "..")\nimport lib.model\n',
    "an entry from __file__": "import os, sys\nhere = os.path.dirname(os.path.abspath(__file__))\n"
    "sys.path.append(os.path.join(here, '..'))\nimport lib.model\n",
    "pathlib": "import sys\nfrom pathlib import Path\nROOT = Path(__file__).resolve().parents[1]\n"
    "sys.path.append(str(ROOT))\nimport lib.model\n",
    "a path": 'rows = open("../data/a.csv")\nimport lib.model\n',
    "an f-string": "import os\nopen(f'{os.getcwd()}/../data/a.csv')\n",
    "an argument": "import sys\nopen(sys.argv[1])\n",
}


@pytest.mark.parametrize("text", UPWARD.values(), ids=UPWARD.keys())
def test_what_a_script_names_above_its_directory_is_there(text: str, tmp_path: Path) -> None:
    here = tmp_path / "project/scripts"
    write(here.parent, {"scripts/train.py": text, "lib/model.py": "", "data/a.csv": "a", "other/b.py": ""})
    code = find_code(here, ("train.py", "--data=../data/a.csv" if "argv" in text else "x"))
    run = copied(tmp_path / "run", code)
    assert (code.root, code.working_directory) == (here.parent, "scripts")
    assert (run.code / "scripts/../data/a.csv").read_text() == "a"
    assert (run.code / "lib").is_symlink() == ("lib" not in text or "sys.path" not in text)
    assert (run.code / "other").is_symlink(), "what is above is copied only if the script imports it"
    assert code.program.import_path == ("{code}/scripts", LIBRARY_PATH)


def test_the_root_is_above_the_directory_only_if_something_names_it(tmp_path: Path) -> None:
    here = tmp_path / "a/b/c/d/project"
    write(
        here, {"train.py": '"""It never reads ../data, or .. at all."""\nprint("..", __file__, "/etc/x")\n', "x.py": ""}
    )
    assert find_code(here, ("train.py",)).root == here
    write(here, {"train.py": 'open("../../../../far.csv")\n'})
    assert find_code(here, ("train.py",)).root == here, "too far: every directory between would be made of links"
    assert find_code(tmp_path / "a/b/c", ("d/project/train.py",)).root == tmp_path / "a/b/c"
    assert find_code(here, ("../project/x.py",)).root == here
    write(here.parent, {"single/one.py": ""})
    assert find_code(here, ("../single/one.py",)).root == here.parent
    with pytest.raises(UserError, match=r"is not below .*: move it there, or --in-place to run it where it is"):
        find_code(here, ("/etc/hostname",))


def test_a_configuration_may_name_a_directory_above(tmp_path: Path) -> None:
    write(tmp_path, {"project/train.py": "", "project/conf/base.yaml": "data: ../data\nout: ../none\n", "data/x": ""})
    code = find_code(tmp_path / "project", ("train.py",))
    assert (code.root, set(code.layout.links)) == (tmp_path, {"data"})


@pytest.mark.parametrize("runs", ["runs", "experiments/runs", "."])
def test_no_run_is_in_a_run(tmp_path: Path, runs: str) -> None:
    old = Path(runs, "old")
    write(tmp_path, {"train.py": "", f"{old}/spec.json": "", f"{old}/events/submit.jsonl": "", "experiments/a.csv": ""})
    run = copied(tmp_path / runs / "new", find_code(tmp_path, ("train.py",), Path(runs)))
    found = {str(path.relative_to(run.code)) for path in run.code.rglob("*") if OUR_DIRECTORY not in path.parts}
    assert {"train.py", "experiments"} <= found <= {"train.py", "experiments", "experiments/a.csv"}


@pytest.mark.parametrize(
    ("files", "tracks", "runs", "gitignore"),
    [
        ({}, "", "runs", "runs/.gitignore"),
        ({"runs/.keep": "", "runs/old/spec.json": "{}", "runs/sweep/sweep.json": "{}"}, "", "runs", "runs/.gitignore"),
        ({".gitignore": "ignored.py\nruns/\n"}, "", "runs", None),
        ({"runs/.gitignore": "*\n!.gitignore\n"}, "", "runs", None),
        ({}, "", ".", "run/.gitignore"),
        ({"outputs/.gitignore": "*.log\n"}, "", "outputs", "outputs/run/.gitignore"),
        ({"outputs/.keep": "", "outputs/old/spec.json": "{}"}, "outputs/old", "outputs", "outputs/run/.gitignore"),
        ({"outputs/notes.md": ""}, "", "outputs", "outputs/run/.gitignore"),
        ({"outputs/notes/a.md": ""}, "", "outputs", "outputs/run/.gitignore"),
    ],
)
def test_runs_do_not_show_in_git_status_and_all_else_does(
    repository: Path, files: dict[str, str], tracks: str, runs: str, gitignore: str | None, shared: Path
) -> None:
    def ours() -> set[Path]:
        return {path for path in here.path.rglob(".gitignore") if "code" not in path.parts}

    def shown() -> str:
        return git(here.path, "status", "--short", "--untracked-files=all")

    here = Site(shutil.copytree(repository, shared / "repository"), "/nonexistent")
    write(here.path, files)
    if tracks:
        git(here.path, "add", "--force", tracks)
    before, had = shown(), {path: path.read_text() for path in ours()}
    _, slurm = queueing_site(shared)
    here.submit("--synthetic", "--batch-size=8", "--name=run", f"--runs-dir={runs}", **slurm)
    hidden = {line for line in before.splitlines() if gitignore == f"{runs}/.gitignore" and f" {runs}/" in line}
    assert set(shown().splitlines()) == set(before.splitlines()) - hidden
    assert {path: path.read_text() for path in had} == had
    assert ours() - had.keys() == ({here.path / gitignore} if gitignore else set())


def test_submission_says_where_the_script_starts_and_what_it_has(repository: Path) -> None:
    words = ("submit", "--cluster=local", "--dry-run", "--name=run", "--", "src/my.py")
    done = Site(repository, "/nonexistent").hpc(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"hpc submit: src/my.py starts in {repository}/runs/run/code, with {sys.executable}",
        f"hpc submit: it has a copy of 9 files of {repository}, and links to the rest: {', '.join(sorted(LINKED))}",
    ]


@pytest.mark.parametrize("is_tracked", [False, True])
def test_code_behind_links_is_copied_and_the_links_lead_to_the_copy(is_tracked: bool, tmp_path: Path) -> None:
    """Packages, directories in sys.path, and the script itself may be links, in and out of the repository."""
    here, outside = tmp_path / "project", tmp_path / "elsewhere"
    write(outside, {"store/real.py": "import beside, inner, outer.a, sys\nsys.path.append('lib')\nimport m\n"})
    write(outside, {"store/beside.py": "", "outer/a.py": "first", "lib/m.py": "", "outer/a.bin": ""})
    write(here, {"src/inner/__init__.py": "", "src/inner/data.txt": ""})
    for name, target in (
        ("inner", "src/inner"), ("outer", str(outside / "outer")), ("lib", "../elsewhere/lib"), ("loop", "loop"),
        ("train.py", str(outside / "chain.py")), ("../elsewhere/chain.py", "store/real.py"),
    ):  # fmt: skip
        (here / name).symlink_to(target)
    if is_tracked:
        git(here, "init", "-q")
        git(here, "add", ".")
    code = find_code(here, ("train.py",))
    run = copied(tmp_path / "run", code)
    start = run.code / code.working_directory
    assert code.script == ("train.py",), "the script's own __file__ is the link's"
    for name in ("train.py", "inner/__init__.py", "outer/a.py", "lib/m.py"):
        assert (start / name).resolve().is_relative_to(run.code), name
    assert ((start / "train.py").resolve().parent / "beside.py").exists()
    for name in ("inner/data.txt", "outer/a.bin"):
        assert (start / name).exists(), name
    assert (start / "loop").is_symlink()


def test_directories_of_placeholders_are_links_if_they_have_data(repository: Path, tmp_path: Path) -> None:
    """Path.rglob enters no link that is within the directory that it searches."""
    write(repository, {"images/README.md": "", "images/raw/.gitkeep": "", "images/raw/a/1.bin": "", "out/.gitkeep": ""})
    git(repository, "add", "-f", "images/README.md", "images/raw/.gitkeep", "out")
    run = copied(tmp_path / "run", find_code(repository, ("src/my.py",)))
    assert [path.name for path in (run.code / "images").rglob("*.bin")] == ["1.bin"]
    assert not (run.code / "out").is_symlink()


def test_a_link_that_leads_to_what_no_run_has_leads_to_the_original(repository: Path, tmp_path: Path) -> None:
    write(repository, {"runs/old/final.pt": "x"})
    (repository / "pretrained").symlink_to("runs/old/final.pt")
    git(repository, "add", "pretrained")
    run = copied(tmp_path / "run", find_code(repository, ("src/my.py",), repository / "runs"))
    assert (run.code / "pretrained").read_text() == "x"


def test_a_script_with_expressions_too_deep_to_read_is_copied(tmp_path: Path) -> None:
    write(tmp_path / "here", {"train.py": "x = p" + " / 'a'" * 2000, "more.py": "x = " + "+".join(["'a'"] * 5000)})
    for name in ("train.py", "more.py"):
        assert name in find_code(tmp_path / "here", (name,)).layout.copies
