"""Reads a batch script, and checks that sbatch would take it. Runs on the login node."""

import shlex
import subprocess
from pathlib import Path

from hpc.base.errors import UserError
from hpc.base.text import did_you_mean

_INTERPRETERS = {"bash", "sh"}
_SUFFIXES = {".sbatch", ".slurm", ".sh", ".job"}


def read_batch_file(path: Path) -> str:
    """Return the text of a batch script. Raises UserError if sbatch or Bash would refuse it, or if it is in Python."""
    if not path.exists():
        scripts = [file.name for file in path.parent.glob("*") if file.suffix in _SUFFIXES]
        hint = did_you_mean(path.name, scripts, "give the path of one, or -- script.py ARGS for a script alone")
        raise UserError(f"there is no batch script {path}: {hint}")
    if path.is_dir():
        raise UserError(f"{path} is a directory: give the path of a batch script")
    data = path.read_bytes()
    if not data.strip():
        raise UserError(f"{path} is empty: give a batch script that sbatch accepts, or -- script.py ARGS")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"{path} is not a text file: give a batch script, or -- script.py ARGS for a Python script")
    _check_is_bash(path, text)
    return text


def _check_is_bash(path: Path, text: str) -> None:
    """Raise UserError if a text is not a batch script in Bash."""
    quoted, first = shlex.quote(str(path)), text.partition("\n")[0].rstrip("\r")
    words = [Path(word).name for word in first.removeprefix("#!").split()]
    interpreter = next((word for word in words if word != "env" and not word.startswith("-")), "")
    if first.startswith("#!") and "python" in interpreter:
        raise UserError(f"{path} is a Python script: put -- before it: hpc submit -- {quoted}")
    if "\r\n" in text:
        raise UserError(f"{path} has DOS line breaks (CRLF), which sbatch refuses: type sed -i 's/\\r$//' {quoted}")
    if not first.startswith("#!"):
        raise UserError(f"{path} does not begin with #!/bin/bash, so sbatch would refuse it: write this line first")
    if interpreter not in _INTERPRETERS:
        raise UserError(f"{path} is a script for {interpreter}: hpc submit reads Bash alone, so write it in Bash")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        problem = done.stderr.partition("\n")[0].removeprefix("bash: ")
        raise UserError(f"{path} is not valid Bash ({problem}): type bash -n {quoted}")


def is_login_shell(text: str) -> bool:
    """Return whether the script's first line asks for a login shell, which reads the profile."""
    return bool({"-l", "--login"} & set(text.partition("\n")[0].split()))


def directives(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return two lists of `#SBATCH` lines with their numbers, without the prefix.

    Slurm reads the lines of the first list, and ignores those of the second, which come after the first command.
    """
    read, ignored = list[tuple[int, str]](), list[tuple[int, str]]()
    target = read
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            target.append((number, line.removeprefix("#SBATCH")))
        elif line.strip() and not line.strip().startswith("#"):
            target = ignored
    return read, ignored
