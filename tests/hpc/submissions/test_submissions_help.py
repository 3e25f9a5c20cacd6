"""The help of `hpc submit`: short, with all flags on request."""

import re

import pytest
from support.cluster import hpc

from hpc.base import program
from hpc.submissions.options import submit_flags
from training.config.command_line import recipes

_MOST_LINES = 120


def printed(flag: str) -> str:
    done = hpc("submit", flag, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return done.stdout


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w(?: \w+)?, )?--([a-z][a-z0-9-]*)", text, re.MULTILINE)) - {"help"}


@pytest.fixture(scope="module")
def brief() -> str:
    return printed("--help")


def test_help_is_short_fits_80_columns_and_names_each_recipe(brief: str) -> None:
    assert len(brief.splitlines()) <= _MOST_LINES
    assert max(map(len, brief.splitlines()[10:])) <= 80  # columns
    assert brief.startswith("usage: hpc submit [-h] [OPTIONS] [job.sbatch] [-- script.py ARGS]\n")
    assert [name for name in recipes() if name not in brief] == []


def test_flags_of_a_script_come_before_those_of_the_classifier(brief: str) -> None:
    assert brief.index("\nown script:\n") < brief.index("\nimage classifier:\n")


def test_help_all_shows_all_flags(brief: str) -> None:
    assert {"nodes", "partition", "time", "elastic", "data", "lr", "recipe", "help-all"} <= flags_in(brief)
    fields = [*program.flags(submit_flags()), *program.flags(submit_flags(("a.py",)))]
    assert flags_in(printed("--help-all")) == {field.name.replace("_", "-") for field in fields}
