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
_ASSIGNS = re.compile(r"(export\s+)?\w+=[^$`]*|(export\s+)?\w+=[\w./${}:-]*")
_SECONDS = 60.0
_ADVICE = "if it chooses the Python of the training, add --python ENV/bin/python"
# Prints the numbers and errors of the lines that fail, and then the path of the program, each after a mark. A line runs
# first in a subshell, for its error, and then in the shell.
_MARK = "torchrelay:"
_PROGRAM = r"""
program=$1 number=0
shift
for line in "$@"; do
  error=$( { eval "$line"; } 2>&1 >/dev/null </dev/null ) && eval "$line" >/dev/null 2>&1 </dev/null \
    || printf '\ntorchrelay:%d:%s\n' $number "${error##*$'\n'}"
  number=$((number + 1))
done
printf '\ntorchrelay:%s\n' "$(type -P "$program")"
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
        printed = subprocess.run(
            command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_SECONDS, check=False,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, [f"the lines before {program} take longer than {_SECONDS:.0f} s here: add --python ENV/bin/python"]
    *failed, path = [line.removeprefix(_MARK) for line in printed.splitlines() if line.startswith(_MARK)] or [""]
    warnings = list[str]()
    for number, _, error in (answer.partition(":") for answer in failed):
        line, reason = lines[int(number)], re.sub(r"^bash: line \d+: ", "", error) or "no message"
        warnings.append(f"line {line.line}: {line.text!r} fails on this machine ({reason}): {_ADVICE}")
    return (_interpreter(Path(path)) if path and path != shutil.which(program) else None), warnings


def _interpreter(program: Path) -> Path:
    """Return the interpreter of a program, which is one itself, or a script such as torchrun."""
    if "python" in program.name or not program.is_file():
        return program if "python" in program.name else program.with_name("python")
    with program.open("rb") as file:
        first = os.fsdecode(file.readline(4096)).strip()
    words = first.removeprefix("#!").split()
    return Path(words[0]) if first.startswith("#!") and "python" in words[0] else program.with_name("python")
