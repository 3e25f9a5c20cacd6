"""Finds the Python with which a batch script starts its training, by Bash. Runs on the login node."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpc.submissions.sbatch.statement_reader import SetupLine

# Lines that may change which Python the PATH finds; and plain assignments, which such lines may use.
_CHOOSES = re.compile(r"(module|ml|source|\.|conda|mamba|micromamba|eval|cd)\s|(export\s+)?PATH=")
_ASSIGNS = re.compile(r"(export\s+)?\w+=([^$`]*|[\w./${}:-]*)")
_SECONDS = 60.0
# Prints the number of each line that fails after its errors, and then the path of the program.
_PROGRAM = r"""
program=$1 number=0
shift
for line; do
  eval "$line" >/dev/null </dev/null || printf '\ntorchrelay:%d\n' $number >&2
  number=$((number + 1))
done
type -P "$program"
"""


def find_python(setup: Sequence[SetupLine], program: str, directory: Path) -> tuple[Path | None, list[str]]:
    """Return the Python of a program such as `torchrun`, and warnings. None if the lines do not choose a Python.

    Runs the lines that may choose one, in Bash, as the job would.
    """
    if "/" in program:
        return _interpreter(directory / Path(program).expanduser()), []
    lines = [line for line in setup if _CHOOSES.match(line.text) or _ASSIGNS.fullmatch(line.text)]
    if not any(_CHOOSES.match(line.text) for line in lines):
        return None, []
    command = ["bash", "-c", _PROGRAM, "bash", program, *(line.text for line in lines)]
    try:
        done = subprocess.run(
            command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, [f"the lines before {program} take longer than {_SECONDS:.0f} s here: add --python ENV/bin/python"]
    warnings = [
        f"line {lines[int(number)].line}: {lines[int(number)].text!r} fails on this machine ({error or 'no message'}): "
        "if it chooses the Python of the training, add --python ENV/bin/python"
        for error, number in re.findall(r"(?:bash: line \d+: )?([^\n]*)\n+torchrelay:(\d+)\n", done.stderr)
    ]
    path = done.stdout.strip()
    return (_interpreter(Path(path)) if path and path != shutil.which(program) else None), warnings


def _interpreter(program: Path) -> Path:
    """Return the interpreter of a program, which is one itself, or a script such as torchrun."""
    if "python" in program.name:
        return program
    first = b""
    if program.is_file():
        with program.open("rb") as file:
            first = file.readline(4096)
    word = os.fsdecode(first.removeprefix(b"#!").strip()).partition(" ")[0]
    return Path(word) if "python" in word else program.with_name("python")
