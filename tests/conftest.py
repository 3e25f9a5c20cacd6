"""Fixtures shared by all tests: one testbed for the whole run, directories that all nodes see, tiny data sets."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("support.cluster")  # before its import: its assertions, too, say what they found
from support.cluster import (  # noqa: E402
    ROOT,
    Command,
    Site,
    hpc_json,
    need,
    remove_left_directories,
    shared_directory,
    tiny_data,
    what_slurm_holds,
)
from support.fake_slurm import write_programs  # noqa: E402
from support.staging_nodes import Nodes  # noqa: E402

USER = "torchrelay-test"
# The tests are of CPUs, on a machine with GPUs too: two ranks cannot share a GPU, and its kernels are others. Those of
# GPUs are `make gpu`.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# What a test starts must see neither a job's nor a rank's variables of the machine that runs it, nor the size of a
# terminal, which pytest-xdist sets.
LEAKS = (
    *("COLUMNS", "LINES", "SLURM_", "SBATCH_", "SUBMITIT_", "TORCHELASTIC_", "TORCHRELAY_"),
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_"),
)
FOR_TESTS = {"TORCHRELAY_REQUIRE_SLURM", "TORCHRELAY_STRESS_SEED"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the testbed, so that `-m slurm` and `-m slow` select it, before pytest selects; and sort."""
    for item in items:
        if "testbed" in getattr(item, "fixturenames", ()):
            item.add_marker("slurm")
        if item.get_closest_marker("slurm") and not item.path.is_relative_to(ROOT / "tests/acceptance"):
            item.add_marker("slow")
    # Start long tests first: at the end they would keep one worker busy while the others are idle.
    long = [ROOT / "tests" / name for name in ("acceptance", "runs", "training/verify_resume")]
    items.sort(key=lambda item: not any(map(item.path.is_relative_to, long)))


_removed = list[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Clean up after an interrupted run."""
    if not hasattr(config, "workerinput"):
        _removed.extend(remove_left_directories())


def pytest_report_header() -> list[str]:
    """Say what was cleaned up."""
    return [f"removed {path}, which an interrupted run had left" for path in _removed]


_testbed: dict[str, Any] = {}
"""The testbed that is up, as `hpc testbed up` answered, with its profile."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the testbed be the kind of cluster that the test's marker `profile` names, or else the usual one."""
    marker = item.get_closest_marker("profile")
    profile, *flags = marker.args if marker else ("usual", "--nodes=4", "--gpus-per-node=4")
    if "testbed" in item.fixturenames and _testbed.get("profile") != profile:  # type: ignore[attr-defined]
        need("slurmctld", "slurmd", "munged", "sbatch", "ip")
        _testbed.setdefault("was_up", hpc_json("testbed", "status")["up"])
        _testbed.update(hpc_json("testbed", "up", "--profile", profile, *flags), profile=profile)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(LEAKS) and name not in FOR_TESTS]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def cluster_is_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """The testbed as the next test needs it, or the test that left something on it is the one that fails."""
    yield
    if "testbed" in request.fixturenames:
        left = what_slurm_holds()
        assert not left, f"{request.node.name} has left this on the testbed: {left}"


@pytest.fixture(scope="session")
def testbed() -> Iterator[dict[str, Any]]:
    """The testbed, four nodes of four GPUs: started once. It is left running if it ran before."""
    yield _testbed
    if not _testbed["was_up"]:
        hpc_json("testbed", "down")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory outside /tmp: the nodes of the testbed have a /tmp of their own."""
    path = shared_directory()
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def slurm_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Replaces one of Slurm's commands by a shell script with the given text."""
    programs = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))

    def write(name: str, script: str) -> None:
        write_programs(programs, **{name: script})

    write("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    write("scontrol", "exit 1")  # the real one would wait for its slurmctld
    return write


@pytest.fixture
def squeue(slurm_command: Command) -> Callable[[str], None]:
    """Slurm's commands, of which squeue is a shell script with the given text."""

    def write(script: str) -> None:
        for name in ("sbatch", "squeue"):
            slurm_command(name, script)

    return write


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A node-local disk."""
    path = tmp_path / "local"
    path.mkdir()
    return path


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.end()


@pytest.fixture
def site(testbed: dict[str, Any], shared: Path) -> Iterator[Site]:
    """A directory with a small data set, on the testbed's cluster."""
    here = Site(shared, testbed["slurm_conf"])
    tiny_data(shared / "data")
    yield here
    here.end_all_jobs()
    subprocess.run(["chown", "-R", "root", str(shared)], check=True)


def need_readable_checkout() -> None:
    """The ordinary user starts this checkout's Python: `make test` runs the tests in a copy where it could not."""
    as_nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    readable = [*as_nobody, "test", "-r", str(ROOT / "pyproject.toml")]
    assert subprocess.run(readable, check=False).returncode == 0, f"ordinary users cannot read {ROOT}: type make test"


@pytest.fixture
def ordinary_user(site: Site) -> Iterator[Site]:
    """The same for somebody who is not root."""
    need_readable_checkout()
    if USER not in {entry.pw_name for entry in pwd.getpwall()}:  # a killed test run has left its user
        subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", USER], check=True)
    subprocess.run(["chown", USER, str(site.path)], check=True)
    own = Site(site.path, site.slurm_conf, USER)
    yield own
    own.end_all_jobs()
    subprocess.run(["userdel", USER], check=True)
