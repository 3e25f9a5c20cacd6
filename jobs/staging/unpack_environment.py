"""This node's copy of the Python environment: unpacked, made to work here, tried, and used if it does.

Runs on compute nodes. What fails here costs this node the speed of its own disk, and nothing else: its ranks then start
from the shared environment, as they do without `--stage-env`.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.staging import NoRoomError
from hpc.staging.progress import stop_if
from hpc.staging.python_environment import EnvironmentDescription
from hpc.staging.source import inside_name
from jobs.context import AgentContext
from jobs.log import log
from jobs.staging.coordination import NodeGroup
from jobs.staging.data import stage

# Prints where the interpreter thinks that it is, and which torch it imports.
_TRY = """
import json, sys, torch
from importlib.metadata import version
print("\\ntorchrelay:" + json.dumps([sys.prefix, torch.__file__, version("torch")]))
"""
_MARK = "torchrelay:"
_POLL_SECONDS = 0.2
_TRY_SECONDS = 300.0
_PATHS = ("PATH", "LD_LIBRARY_PATH")


def stage_environment(node: AgentContext) -> None:
    """Have this node's ranks start from a copy of the environment on its own disk, if the run asks for it.

    Raises:
        StagingStopped: the agent was asked to stop, or the attempt is over.
    """
    if node.spec.stage_env is None:
        return
    archive, began, fallback = Path(node.spec.stage_env), time.monotonic(), None
    try:
        node.python = _copy(node, archive)
    except (TorchrelayError, OSError) as error:
        NodeGroup(node, str(archive)).decline()
        fallback = (
            f"{error.reason}: use --stage-dir with a larger disk" if isinstance(error, NoRoomError) else str(error)
        )
        log(f"the ranks of {node.place.host} start from the shared environment, {sys.prefix}: {fallback}")
    seconds = round(time.monotonic() - began, 3)
    node.note("environment", node=node.place.host, python=node.python, seconds=seconds, fallback=fallback)


def _copy(node: AgentContext, archive: Path) -> str:
    """The interpreter of a copy that works.

    Raises:
        TorchrelayError, OSError: there is none, and why.
    """
    copy = stage(node, archive).path
    described = EnvironmentDescription.load(copy)
    for name, target in described.links.items():
        make_link(copy / inside_name(name), target)
    python = copy / inside_name(described.python)
    if not python.exists():
        raise TorchrelayError(f"{python} leads to {os.path.realpath(python)}, which is not on this node")
    prefix, torch, version = _ask(node, str(python))
    expected = [copy, copy / inside_name(described.torch)]
    if version != described.torch_version or not all(map(os.path.samefile, [prefix, torch], expected)):
        raise TorchrelayError(
            f"{python} runs in {prefix} and imports torch {version} from {torch}, and not "
            f"{described.torch_version} from {expected[1]}: is there a PYTHONPATH?"
        )
    return str(python)


def make_link(path: Path, target: str) -> None:
    """Make a link, or leave it if another job has made it; whoever looks finds it whole."""
    if path.is_symlink() and os.readlink(path) == target:  # noqa: PTH115 - a Path would lose a trailing slash
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.symlink_to(target)
    temporary.replace(path)


def _ask(node: AgentContext, python: str) -> list[str]:
    """What the copy says of itself, after it has imported torch: no less shows that every library is found.

    It is no loss: the ranks then find what it has read in memory.
    """
    deadline = time.monotonic() + _TRY_SECONDS
    command = [python, "-P", "-c", _TRY]
    environment = activated(os.environ, python)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        try:
            while True:
                try:
                    out, errors = process.communicate(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    _look_after(node, deadline)
        except BaseException:
            process.kill()
            raise
    _look_after(node, deadline)  # a signal that asks this node to stop ends the copy's process, too
    return _answer(process.returncode, out, errors)


def _look_after(node: AgentContext, deadline: float) -> None:
    node.turn()
    stop_if(bool(node.stop) or node.orders.over or node.head_is_lost)
    if time.monotonic() > deadline:
        raise TorchrelayError(f"the copy did not import torch within {_TRY_SECONDS:.0f} s")


def _answer(exit_code: int, out: str, errors: str) -> list[str]:
    """What it said, among all that packages print. Pure."""
    said = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
    if exit_code == 0 and said:
        return [str(word) for word in json.loads(said[0])]
    words = errors.strip().splitlines() or [f"exit code {exit_code}"]
    raise TorchrelayError(f"the copy does not import torch: {words[-1]}")


def activated(base: Mapping[str, str], python: str, prefix: str = sys.prefix) -> dict[str, str]:
    """A process environment in which the environment of an interpreter is the active one. Pure.

    Args:
        base: with another environment, or this very one, in which case nothing changes.
        python: `bin/python` of the environment.
        prefix: of the other one: what leads there on the way to programs and libraries then leads to the copy.
    """
    copy = str(Path(python).parent.parent)
    if copy == prefix:
        return dict(base)
    changes = {name: _moved(base[name], prefix, copy) for name in _PATHS if name in base}
    others = (entry for entry in changes.get("PATH", "").split(":") if entry not in {f"{copy}/bin", ""})
    programs = [f"{copy}/bin", *others]
    changes["PATH"] = ":".join(programs)
    active = "CONDA_PREFIX" if base.get("CONDA_PREFIX") == prefix else "VIRTUAL_ENV"
    return {**{name: value for name, value in base.items() if name != "PYTHONHOME"}, **changes, active: copy}


def _moved(path: str, old: str, new: str) -> str:
    entries = path.split(":")
    return ":".join(new + entry.removeprefix(old) if f"{entry}/".startswith(f"{old}/") else entry for entry in entries)
