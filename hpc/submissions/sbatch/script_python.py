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
_MARK = "torchrelay:"
# Each line is an argument. Its output is hidden, but for its last error; the last argument is the program.
_PROGRAM = r"""
while [ $# -gt 1 ]; do
  errors=$( { eval "$1"; } 2>&1 >/dev/null </dev/null ) && eval "$1" >/dev/null 2>&1 </dev/null \
    || printf '\ntorchrelay:failed:%s\t%s\n' "$1" "${errors##*$'\n'}"
  shift
done
printf '\ntorchrelay:found:%s\n' "$(type -P "$1")"
"""


def find_python(setup: Sequence[SetupLine], program: str, directory: Path) -> tuple[Path | None, list[str]]:
    """Return the Python of a program such as `torchrun`, and warnings. None if the lines do not choose a Python.

    Runs the lines that may choose one, in Bash, as the job would.
    """
    chosen = [line for line in setup if _CHOOSES.match(line.text) or _ASSIGNS.fullmatch(line.text)]
    if "/" in program:
        return _interpreter(directory / Path(program).expanduser()), []
    if not any(_CHOOSES.match(line.text) for line in chosen):
        return None, []
    done = subprocess.run(
        ["bash", "-c", _PROGRAM, "bash", *(line.text for line in chosen), program],
        cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
        check=False,
    )  # fmt: skip
    answers = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    found = next((answer.removeprefix("found:") for answer in answers if answer.startswith("found:")), "")
    numbers = {line.text: line.line for line in chosen}
    warnings = list[str]()
    for answer in answers:
        if answer.startswith("failed:"):
            text, _, error = answer.removeprefix("failed:").partition("\t")
            error = re.sub(r"^bash: line \d+: ", "", error)
            warnings.append(
                f"line {numbers.get(text, '?')}: {text!r} fails on this machine ({error or 'no message'}): if it "
                "chooses the Python of the training, add --python ENV/bin/python"
            )
    if not found or found == shutil.which(program):
        return None, warnings
    return _interpreter(Path(found)), warnings


def _interpreter(program: Path) -> Path:
    """Return the interpreter of a program, which is one itself, or a script such as torchrun."""
    if "python" in program.name or not program.is_file():
        return program if "python" in program.name else program.with_name("python")
    with program.open("rb") as file:
        first = os.fsdecode(file.readline(4096)).strip()
    words = first.removeprefix("#!").split()
    return Path(words[0]) if first.startswith("#!") and "python" in words[0] else program.with_name("python")
