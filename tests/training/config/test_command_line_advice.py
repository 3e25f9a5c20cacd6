"""Names that other trainers have for our flags, and our former names: each is answered with the flag to type."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc.core.errors import UserError
from hpc.submit.options import SubmitScript, SubmitTraining, flag_names
from training.config.command_line import ADVICE, advice_for, check_names, with_config

SUBMIT = flag_names(SubmitTraining)
TRAINING = [*SUBMIT, "config", "recipe", "run-dir", "help-all"]
SCRIPT = flag_names(SubmitScript)
NOT_OURS = {"nproc-per-node"}  # torchrun's


@pytest.mark.parametrize("name", ADVICE)
def test_every_answer_names_flags_that_exist(name: str) -> None:
    named = re.findall(r"--([a-z][a-z0-9-]*)", ADVICE[name])
    assert named
    assert set(named) <= {*TRAINING, *SCRIPT, *NOT_OURS}
    assert name not in TRAINING


@pytest.mark.parametrize(
    ("typed", "flag"),
    [
        ("--learning-rate", "--lr"), ("--fp16", "--amp fp16"), ("--pretrained", "--weights"),
        ("--resume", "resumes from its newest checkpoint by itself"), ("--workers", "--num-workers"),
        ("--accumulate-grad-batches", "--grad-accum-steps"),
        ("--precision", "--amp"), ("--max-epochs", "--epochs"), ("--clip-grad", "--clip-grad-norm"),
        ("--sched", "--lr-scheduler"), ("--opt", "--optimizer"), ("--model-ema", "--ema-decay"),
        ("--reprob", "--random-erasing"), ("--aa", "--auto-augment"), ("--val-fraction", "--val-split"),
        ("--scale", "--crop-scale"), ("--ratio", "--crop-ratio"), ("--crop-pct", "--eval-crop-pct"),
        ("--train-interpolation", "--interpolation"),
        ("--policy", "--auto-augment"), ("--batch", "--batch-size"), ("--devices", "--gpus-per-node"),
        ("--num-nodes", "--nodes"), ("--gpus", "--gpus-per-node"), ("--learning_rate=0.1", "--lr"),
        ("-j", "--num-workers"),
    ],
)  # fmt: skip
def test_a_rivals_name_is_answered_with_ours(typed: str, flag: str) -> None:
    with pytest.raises(UserError, match=f"^there is no flag {typed.partition('=')[0]}: .*{flag}"):
        check_names([typed, "1"], SUBMIT)


def test_our_own_flags_and_their_values_are_not_answered() -> None:
    check_names([f"--{name}" for name in TRAINING], SUBMIT)
    check_names(["--name", "resume", "--data=--workers", "--lr", "-1"], SUBMIT)


def test_a_file_is_answered_as_the_command_line_is(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("learning_rate: 0.1\n")
    with pytest.raises(UserError, match=r"c.yaml: there is no flag 'learning_rate': use --lr$"):
        with_config([f"--config={tmp_path / 'c.yaml'}"], SUBMIT)


def test_a_script_of_ones_own_is_not_told_of_training_flags() -> None:
    known = flag_names(SubmitScript)
    assert advice_for("learning-rate", known) is None
    assert advice_for("devices", known)


@pytest.mark.parametrize("module", ["hpc.submit", "training"])
def test_every_program_answers_in_one_line(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", module, "--data=x", "--max-epochs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"(error|hpc submit): there is no flag --max-epochs: use --epochs\n", done.stderr)
