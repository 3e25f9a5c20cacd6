"""The help of `hpc submit`: two screens, and each flag once; of the verbs whose defaults are those of a run."""

import re

import pytest
from support.cluster import hpc

from hpc.core import program
from hpc.submit.options import SubmitTraining

_LINES_OF_TWO_SCREENS = 100


def printed(flag: str, verb: str = "submit") -> str:
    done = hpc(verb, flag, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return done.stdout


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^│ (?:-\w [\w:]+, )?--([a-z][a-z0-9-]*)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def brief() -> str:
    return printed("--help")


def test_help_fits_two_screens_and_begins_with_examples(brief: str) -> None:
    assert len(brief.splitlines()) <= _LINES_OF_TWO_SCREENS
    assert max(map(len, brief.splitlines()[10:])) <= 80  # columns
    assert brief.startswith("usage: hpc submit [-h] [OPTIONS] [-- script.py ARGS]\n")


def test_two_helps_together_show_each_flag_once(brief: str) -> None:
    everyday, others = flags_in(brief), flags_in(printed("--help-train"))
    assert {"nodes", "partition", "time", "elastic", "data", "lr", "recipe", "help-train"} <= everyday
    assert not everyday & others
    assert everyday | others == {field.name.replace("_", "-") for field in program.flags(SubmitTraining)}


def test_defaults_that_tell_nothing_are_not_shown(brief: str) -> None:
    assert not re.search(r"\(default:\s*(│\s*)*(None|False|)\)|\{None\}", brief)
    assert "(default: 512)" in brief


@pytest.mark.parametrize("verb", ["resume", "fork"])
def test_default_of_what_a_run_has_is_that_of_the_run(verb: str) -> None:
    text = re.sub(r"[\s│]+", " ", printed("--help", verb))
    for flag in ("--nodes N", "--time TIME", "--elastic", "--interface STR", "--notify NAME", "--epochs INT"):
        assert text.partition(flag)[2].partition("(default: ")[2].startswith("as before)"), flag
    assert "Default:" not in text.partition("resources options")[2]
    assert "(default: runs)" in text


def test_help_of_fork_leaves_out_what_it_refuses() -> None:
    assert not {"config", "recipe"} & flags_in(printed("--help", "fork"))
