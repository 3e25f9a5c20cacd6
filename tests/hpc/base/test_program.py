"""Words of a command line, of files and of Python become the values of a dataclass, or are refused with a reason."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc.base import program
from hpc.base.errors import UserError
from hpc.base.units import NodeRange
from hpc.commands.cluster.doctor import DoctorOptions
from hpc.commands.start.status import StatusOptions
from hpc.submissions.options import submit_flags
from hpc.submissions.resumed_run import ResumeOptions
from hpc.submissions.sbatch.sbatch_advice import explain
from training.config.train_config import TrainConfig
from training.inference.predict import PredictOptions


def read(options: type[Any], *words: str) -> dict[str, Any]:
    return program.read((options,), words, "hpc x", explain)


@pytest.mark.parametrize(
    ("options", "words", "values"),
    [
        (submit_flags(), ("-N2", "-t", "1h", "--batch_size=8"), {"nodes": "2", "time": "1h", "batch-size": "8"}),
        (submit_flags(), ("--elastic", "--no-wait", "--lr", "-1"), {"elastic": True, "wait": False, "lr": "-1"}),
        (submit_flags(), ("--setup=a", "--setup", "b c", "--lr=1", "--lr=2"), {"setup": ["a", "b c"], "lr": "2"}),
        (submit_flags(), ("--name", "resume", "--data=--x", "--mem="), {"name": "resume", "data": "--x", "mem": ""}),
        (ResumeOptions, ("--elastic", "--time", "2h", "r"), {"elastic": True, "time": "2h", "run": "r"}),
        (StatusOptions, ("a", "--json", "b"), {"run": ["a", "b"], "json": True}),
        (StatusOptions, ("--", "a", "b"), {"run": ["a", "b"]}),
        (DoctorOptions, ("--node", "a", "b", "--json"), {"node": ["a", "b"], "json": True}),
        (DoctorOptions, ("--node",), {"node": []}),
        (PredictOptions, ("m", "a.png", "b.png"), {"model": "m", "images": ["a.png", "b.png"]}),
    ],
)  # fmt: skip
def test_words_are_read(options: type[Any], words: tuple[str, ...], values: dict[str, Any]) -> None:
    assert read(options, *words) == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--epoch", "3"), "there is no flag --epoch: did you mean --epochs?"),
        (("--no-epochs",), "there is no flag --no-epochs"),
        (("-x", "a"), "there is no flag -x: use --exclude instead"),
        (("--gres=gpu:4",), "there is no flag --gres: use --gpus-per-node 4 or a100:4 for GPUs"),
        (("--time", "--elastic"), "--time has no value"),
        (("--wait=true",), "--wait takes no value"),
        (("--wait", "a.py", "--lr"), "put -- before a.py: --wait -- a.py --lr"),
        (("a",), "unexpected argument: a"),
        (("--",), "nothing follows --"),
        (
            ("--wait", "--", "a.py"),
            "only hpc submit, sweep, scaling and fork take words after --: leave out -- and",
        ),
    ],
)
def test_words_that_are_not_understood_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        read(submit_flags(), *words)


def test_a_value_of_python_is_what_its_text_would_be() -> None:
    typed = {"data": "x", "nodes": "2", "lr": "1", "setup": ["a"], "stage-dir": "/x", "elastic": "true"}
    given = {"data": Path("x"), "nodes": 2, "lr": 1, "setup": ("a",), "stage-dir": Path("/x"), "elastic": True}
    made = program.build(submit_flags(), given)
    assert made == program.build(submit_flags(), typed)
    assert (made.program.train.lr, made.resources.nodes, made.stage_dir) == (1.0, NodeRange(2), Path("/x"))
    assert program.build(submit_flags(), program.values_of(made)) == made


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", "1.5", "--epochs is '1.5': expected a whole number"),
        ("epochs", True, "--epochs is 'True': expected a whole number"),
        ("lr", [1], r"--lr is '\[1\]': expected a number"),
        ("lr", -1, "--lr is -1.0: use a number above 0"),
        ("compile", 1, "--compile is '1': expected true or false"),
        ("model", {}, "--model is '{}': expected text"),
        ("optimizer", "adan", "--optimizer is 'adan': use one of 'sgd', 'adamw', 'adam'"),
        ("tracker", ("wandb", "x"), "--tracker is 'x': use one of 'wandb', 'mlflow'"),
        ("stage-dir", 5, "--stage-dir is '5': expected a path"),
        ("grace-period", 90, "--grace-period is '90': use a duration such as 90s"),
    ],
)
def test_a_wrong_value_is_refused_wherever_it_comes_from(name: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        program.build(submit_flags(), {"data": "x", name: value})


def test_what_must_be_given_is_asked_for() -> None:
    with pytest.raises(UserError, match="missing argument RUN: Run directory or name"):
        program.build(ResumeOptions, {})


def test_flags_of_another_program_are_read_to_be_refused() -> None:
    assert program.read((submit_flags(("a.py",)), submit_flags()), ["--lr=1"], "x") == {"lr": "1"}
    assert program.read((ResumeOptions, TrainConfig), ["r", "--lr=1"], "x") == {"run": "r", "lr": "1"}


def test_a_path_that_is_not_utf8_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8", write_through=True))
    assert program.run(lambda: print(os.fsdecode(b"caf\xe9")) or 0) == 0
    assert written.getvalue() == b"caf\\udce9\n"
