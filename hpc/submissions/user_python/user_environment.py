"""Checks the user's own environment (`--python`, `--container`) before the run is queued. Runs on the login node.

torchrun and the ranks of a user's script run in this environment; the agents run in the environment of `hpc`. Some of
our modules run in both, so they import only the standard library and torch: training.runtime.__main__ and the
rendezvous that it loads, the rank wrapper, and the preflight.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc.base import container
from hpc.base.errors import UserError
from hpc.base.files import expanded
from hpc.base.node_info import TorchBuild, parse_torch_version
from hpc.submissions.checks import check_is_shared

# The environment of Torchrelay itself needs a newer torch (pyproject.toml).
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 6)
# Importing torch from slow storage takes minutes.
_IMPORT_SECONDS = 300.0
_MARK = "torchrelay:"
_USE_ANOTHER = "use --python ENV/bin/python"
# Any Python 3 can run this program, and so report that it is too old.
_LOOK = f"""
import json, sys
print("\\n{_MARK}" + json.dumps(list(sys.version_info[:2])))
sys.stdout.flush()
import torch, torch.distributed.run
print("\\n{_MARK}" + json.dumps([str(torch.__version__), torch.__file__]))
"""


def check_use(flag: str, value: Path | str | None, *, trains: bool, stages: bool) -> None:
    """Raise UserError if `--python` or `--container` is given for the classifier or together with `--stage-env`."""
    if value is None:
        return
    if trains:
        raise UserError(
            f"{flag} is {value}, but it applies only to your own script (-- script.py): the image classifier needs the "
            "packages that torchrelay depends on; leave it out, or install torchrelay in that environment and submit "
            "with the hpc of that environment"
        )
    if stages:
        raise UserError(
            f"{flag} is {value}, but --stage-env copies the environment of hpc, in which no rank would start: leave "
            "one of the two flags out"
        )


def find_python() -> Path | None:
    """Return the Python of a script without --python; None if it is the Python of hpc.

    It is the Python of this shell's active venv or conda environment. If none is active, and Torchrelay is installed
    without torch, it is the first python3 on the PATH, such as an environment module's.
    """
    if active := _active_python():
        return active
    if importlib.util.find_spec("torch") is None:
        return Path(shutil.which("python3") or sys.executable)
    return None


def _active_python() -> Path | None:
    """Return the Python of this shell's active venv or conda environment; None if there is none, or if it is ours.

    conda's `base` does not count: many shells activate it, and few people install torch there.
    """
    conda = "" if os.environ.get("CONDA_DEFAULT_ENV") == "base" else os.environ.get("CONDA_PREFIX")
    active = os.environ.get("VIRTUAL_ENV") or conda
    if not active or Path(active).resolve() == Path(sys.prefix).resolve():
        return None
    return Path(active, "bin", "python")


def resolve(
    image: str | None, python: Path | None, setup: Sequence[str], *, on_cluster: bool, found: Path | None = None
) -> tuple[str | None, str | None, TorchBuild | None]:
    """Return the path of the image of `--container`, the interpreter that starts the ranks, and its build of torch.

    The path is absolute, or None if there is no image. Without an image and `--python`, the interpreter is the `found`
    one, or None for that of hpc. The build is None if it is unknown. Raises UserError if torchrun and the ranks cannot
    run with the interpreter.
    """
    if image is not None:
        path, interpreter = _find_image(image, on_cluster=on_cluster), str(python or "python3")
        _check_in_container(path, interpreter, setup)
        return str(path), interpreter, None
    if given := python or found:
        which = "the active environment's Python" if _active_python() else "no environment is active, and python3"
        return None, *check(given, setup, flag="--python" if python else which, on_cluster=on_cluster)
    spec = importlib.util.find_spec("torch")  # does not import torch, which takes seconds
    return None, None, _build_of(spec.origin if spec else None)


def _build_of(torch_file: Path | str | None) -> TorchBuild | None:
    """Return the build of the torch whose module is this file; None if it is unknown."""
    path = Path(torch_file).with_name("version.py") if torch_file else None
    return parse_torch_version(path.read_text()) if path and path.exists() else None


def check(
    given: Path, setup: Sequence[str], *, flag: str = "--python", on_cluster: bool
) -> tuple[str, TorchBuild | None]:
    """Return the absolute path of an interpreter, and its build of torch; None if it is unknown.

    Raises UserError if the interpreter cannot run torchrun and the ranks.

    `flag` names the interpreter in errors. The lines of `--setup`, which are for the nodes, do not run here. If there
    are such lines and torch cannot be imported, only a warning is printed.
    """
    # A Python that the user has not named may be that of a command without --python.
    advice = _USE_ANOTHER if flag == "--python" else "activate the environment of your script"
    path = _executable(given, flag, advice)
    if on_cluster:
        for used in (path.parent, path):
            check_is_shared(flag, used)
    torch_file = _check_answers(f"{flag} is {given}", [str(path)], setup, advice)
    if on_cluster and torch_file:
        check_is_shared(f"{flag} imports torch from", torch_file)
    return str(path), _build_of(torch_file)


def _find_image(given: str, *, on_cluster: bool) -> Path:
    """Return the absolute path of an image of `--container`. Raises UserError if nodes could not read it."""
    if "://" in given:
        raise UserError(
            f"--container is {given}, which every node would have to download: type apptainer pull image.sif {given}, "
            "and use --container image.sif"
        )
    path = expanded(given).absolute()
    if not path.exists():
        raise UserError(f"--container is {given}, which does not exist: give the path of an Apptainer image")
    if on_cluster:
        check_is_shared("--container", path)
    return path


def _check_in_container(image: Path, python: str, setup: Sequence[str]) -> None:
    """Check an interpreter in an image, like `check`. Raises UserError if torchrun and the ranks cannot run there.

    If there is no Apptainer here, but --setup may provide it on the nodes, only print a warning.
    """
    flag, engine = f"--container is {image}", container.find_engine()
    if engine is None:
        problem = "there is neither apptainer nor singularity here"
        if not setup:
            raise UserError(
                f"{flag}, and {problem}: load its module, also on the nodes: --setup 'module load apptainer'"
            )
        print(f"hpc submit: warning: {flag}, which is not checked: {problem}", file=sys.stderr)
        return
    program = container.inside(engine, image, [python])
    _check_answers(f"{flag}, with the interpreter {python}", program, setup, _USE_ANOTHER)


def _check_answers(flag: str, program: Sequence[str], setup: Sequence[str], advice: str) -> Path | None:
    """Check that an interpreter and its torch are new enough. Returns the path of torch's module.

    Returns None if torch cannot be imported here, but --setup may make it importable on the nodes. `advice` says how to
    name another interpreter. Raises UserError if the interpreter cannot be used.
    """
    answers, problem = _ask(program)
    if not answers:
        raise UserError(f"{flag}, which does not run as a Python interpreter here ({problem})")
    if tuple(answers[0]) < OLDEST_PYTHON:
        raise UserError(f"{flag}, which is Python {_dotted(answers[0])}: use {_dotted(OLDEST_PYTHON)} or newer")
    if len(answers) == 1:
        if not setup:
            raise UserError(f"{flag}, which does not import torch ({problem}): install torch there, or {advice}")
        print(
            f"hpc submit: warning: {flag}, which imports torch only with --setup, if at all ({problem})",
            file=sys.stderr,
        )
        return None
    version, torch_file = answers[1]
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        raise UserError(f"{flag}, which has torch {version}: install torch {_dotted(OLDEST_TORCH)} or newer there")
    return Path(torch_file)


def _executable(given: Path, flag: str, advice: str) -> Path:
    # A venv's interpreter is a link. It is not resolved, because the interpreter finds the venv relative to the link.
    # Links to the interpreter's directory are resolved, because they may be missing on other nodes.
    path = expanded(given).absolute()
    path = path.parent.resolve() / path.name
    if path.is_dir():
        raise UserError(f"{flag} is {given}, which is a directory: use its interpreter, such as {given}/bin/python")
    if not os.access(path, os.X_OK):
        problem = "is not executable" if path.exists() else "does not exist"
        raise UserError(f"{flag} is {given}, which {problem}: {advice}")
    return path


def _ask(program: Sequence[str]) -> tuple[list[list[Any]], str]:
    """Return what the interpreter reports (its version, then torch's version and file), and why a report is missing."""
    try:
        # The directory is /, because `-c` would first import from the current directory.
        done = subprocess.run(
            [*program, "-c", _LOOK],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        out, problem = error.stdout or b"", f"it took longer than {_IMPORT_SECONDS:.0f} s"
    except OSError as error:
        return [], str(error)
    else:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        out, problem = done.stdout, lines[-1] if lines else f"exit code {done.returncode}"
    said = out.decode(errors="replace").splitlines()
    return [json.loads(line.removeprefix(_MARK)) for line in said if line.startswith(_MARK)], problem


def _dotted(version: Sequence[object]) -> str:
    return ".".join(map(str, version))
