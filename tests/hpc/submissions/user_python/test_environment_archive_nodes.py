"""The packed environment on several nodes, without Slurm: a process and a directory for each node."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import Site, add_script
from support.environments import BASE, SITE, make_venv, pack
from support.staging_nodes import Nodes

from hpc.submissions.user_python.environment_archive import DIRECTORY

NODES = 2


def pythons(nodes: Nodes, archive: Path, **node_1: str) -> list[Path]:
    """Run a job to its end; the interpreter of each node. `node_1` adds variables to the environment of node 1."""
    return [Path(result["python"]) for result in nodes.stage(archive, NODES, "--env", node_1=node_1)]


def test_every_node_has_a_copy_that_works(nodes: Nodes, tmp_path: Path) -> None:
    talks = "import atexit\nprint('hello', end='')\natexit.register(print, 'bye')\n"
    interpreters = pythons(nodes, pack(make_venv(tmp_path / "venv", talks), tmp_path))
    for rank, python in enumerate(interpreters):
        assert python.is_relative_to(nodes.disk(rank))
        code = "import sys, torch; print(); print(sys.prefix, torch.__file__)"
        output = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        copy = python.parent.parent
        assert output.splitlines()[1].split() == [str(copy), str(copy / SITE / "torch" / "__init__.py")]
    assert [event["fallback"] for event in nodes.events("environment")] == [None] * NODES


def test_node_on_which_the_copy_does_not_work_uses_the_shared_one_alone(nodes: Nodes, tmp_path: Path) -> None:
    torch = "import os\nif os.environ.get('BROKEN'): raise ImportError('libcudart.so.13: cannot open')\n"
    good, bad = pythons(nodes, pack(make_venv(tmp_path / "venv", torch), tmp_path), BROKEN="1")
    assert good.is_relative_to(nodes.disk(0))
    assert bad == Path(sys.executable)
    assert "libcudart.so.13: cannot open" in nodes.events("environment")[1]["fallback"]


@pytest.mark.parametrize("gone", ["/opt/gone/python3, which is not on this node", "gone.tar.zst"])
def test_base_interpreter_or_archive_that_is_gone_is_named_and_holds_nobody_up(
    gone: str, nodes: Nodes, tmp_path: Path
) -> None:
    venv = make_venv(tmp_path / "venv")
    link = venv / "bin" / Path(BASE).name
    link.unlink()
    link.symlink_to("/opt/gone/python3")
    archive = tmp_path / gone if gone.endswith(".zst") else pack(venv, tmp_path)
    assert pythons(nodes, archive) == [Path(sys.executable)] * NODES
    assert all(gone in event["fallback"] for event in nodes.events("environment"))


def test_node_that_is_asked_to_stop_does_not_wait_for_the_import(nodes: Nodes, tmp_path: Path) -> None:
    torch = f"import time\nopen({str(tmp_path / 'importing')!r}, 'w').close()\ntime.sleep(100)\n"
    started = nodes.start(pack(make_venv(tmp_path / "venv", torch), tmp_path), NODES, "--env")
    while not (tmp_path / "importing").exists():
        assert all(process.poll() is None for process in started)
    for process in started:
        process.send_signal(signal.SIGTERM)
    assert all(process.wait(60) for process in started)


SCRIPT = """
import json, os, shutil, sys, torch
print(json.dumps([sys.executable, sys.prefix, os.environ["VIRTUAL_ENV"], shutil.which("tool"), torch.__file__]))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_a_run_start_from_the_copy(shared: Path) -> None:
    """With the real torch: the small venv has links to it, as uv can make them."""
    venv = make_venv(shared / "venv")
    shutil.rmtree(venv / SITE / "torch")
    shutil.rmtree(venv / SITE / "torch-9.dist-info")
    real = next(Path(path) for path in sys.path if (Path(path) / "torch").is_dir())
    for part in ("torch", *(path.name for path in real.glob("torch-*.dist-info"))):
        (venv / SITE / part).symlink_to(real / part)
    site = Site(shared, "/nonexistent")
    add_script(site, "my.py", SCRIPT)
    (shared / "disk").mkdir()
    flags = ("--cluster=local", "--nodes=1", "--stage-env", "--stage-dir=disk", "--name=own", "--wait", "--json")
    done = site.type(str(venv / "bin" / "python"), "-m", "hpc", "submit", *flags, "--", "my.py")
    assert done.returncode == 0, done.stderr + done.stdout
    output = json.loads((shared / "runs/own/logs/attempt-001/rank-00.log").read_text().splitlines()[-1])
    executable, prefix, active, tool, torch = map(Path, output)
    assert prefix.is_relative_to(shared / "disk")
    assert (executable, active, tool) == (prefix / "bin" / "python", prefix, prefix / "bin" / "tool")
    assert torch == prefix / SITE / "torch" / "__init__.py"
    assert len(list((shared / "runs" / DIRECTORY).iterdir())) == 1
