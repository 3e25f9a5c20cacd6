"""Shell completion, in the shells themselves."""

import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from hpc.__main__ import PROGRAMS, VERBS
from hpc.commands.cluster.completion import main, options_of

# What bash calls when somebody types TAB after these words.
_BASH = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
_shtab_hpc
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with (directory / shell).open("w") as file, redirect_stdout(file):
            assert main([shell]) == 0
    return directory


def completed(*command: str | Path) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return {line.partition("\t")[0] for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("hpc", "re"), {"report", "resume"}),
        (("hpc", "submit", "--no"), {"--nodes", "--notify"}),
        (("hpc", "submit", "--amp", ""), {"none", "bf16", "fp16"}),
        (("hpc", "testbed", "kill"), {"kill-node"}),
        (("hpc", "predict", "--to"), {"--top"}),
    ],
)
def test_bash_and_fish_offer_verbs_flags_and_values(scripts: Path, typed: tuple[str, ...], offered: set[str]) -> None:
    assert completed("bash", "-c", _BASH, "bash", scripts / "bash", *typed) == offered
    if fish := shutil.which("fish"):
        words = " ".join(typed[:-1])
        in_fish = completed(fish, "--no-config", "-c", f"source {scripts / 'fish'}; complete -C '{words} {typed[-1]}'")
        assert offered <= in_fish


def test_zsh_can_read_its_script_and_every_verb_is_completed(scripts: Path) -> None:
    if zsh := shutil.which("zsh"):
        assert completed(zsh, "-n", scripts / "zsh") == set()
    assert all(map(options_of, (*VERBS, *PROGRAMS)))
