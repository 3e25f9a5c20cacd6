"""Which trainings of Hugging Face's Trainer get torchrelay's callback, in scripts that do not know of it.

The tests run where TORCHRELAY_EXAMPLES names the Python of the examples' environment (examples/README.md).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.cluster import ROOT
from support.relay_script import agent_variables

LIBRARIES = os.environ.get("TORCHRELAY_EXAMPLES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not LIBRARIES, reason="TORCHRELAY_EXAMPLES does not name a Python with transformers"),
]

# Gets SIGTERM in the fourth step of the last training. A training of 8 steps saves a checkpoint at its end.
SCRIPT = """
import os, signal, sys, threading
sys.path[:0] = {path!r}
from jobs.ranks.script.attached_callback import attach_callbacks
attach_callbacks()
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x=None, labels=None):
        return {{"loss": (self.layer(x) - labels).square().mean()}}

class Logs(Trainer):
    def log(self, logs, *others):
        super().log({{**logs, "note": "a text", "none": None, "many": [1, 2]}}, *others)

class SendsSignal(TrainerCallback):
    def on_step_begin(self, _arguments, state, _control, **_):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

class HandlesSignal(TrainerCallback):
    def on_train_begin(self, *_, **__):
        signal.signal(signal.SIGTERM, lambda *_: print("handled"))

def train(name, *callbacks):
    arguments = TrainingArguments(
        name, max_steps=8, per_device_train_batch_size=2, save_steps=100, logging_steps=1, report_to=[],
        disable_tqdm=True, use_cpu=True,
    )
    data = [{{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])}} for n in range(8)]
    Logs(model=Model(), args=arguments, train_dataset=data, callbacks=[*callbacks]).train()

{code}
"""


def run(directory: Path, code: str) -> tuple[list[str], str]:
    """Run a script as the only rank, and return the steps of its trainings' checkpoints and its output."""
    path = [str(ROOT), str(ROOT / "training" / "relay")]
    variables = {**agent_variables(directory), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [LIBRARIES or "", "-c", SCRIPT.format(path=path, code=code)], cwd=directory,
        env={**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    checkpoints = sorted(str(path.relative_to(directory)) for path in directory.glob("*/checkpoint-*"))
    return checkpoints, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "checkpoints"),
    [
        ("train('first')\ntrain('second', SendsSignal())", ["first/checkpoint-8", "second/checkpoint-4"]),
        ("from torchrelay import report\ntrain('only', SendsSignal())", ["only/checkpoint-4"]),
    ],
    ids=["the second training", "imports torchrelay"],
)
def test_each_training_saves_its_last_step_when_it_is_to_stop(
    tmp_path: Path, code: str, checkpoints: list[str]
) -> None:
    saved, output = run(tmp_path, f"{code}\nprint('goes on')")
    assert saved == checkpoints
    assert "goes on" not in output
    assert output.count("when Slurm stops the job, this Trainer saves") == len(checkpoints)
    events = (tmp_path / "events" / "attempt-001-script.jsonl").read_text().splitlines()
    assert json.loads(events[-1]).items() >= {"event": "train_stopped", "step": 4, "signal": "SIGTERM"}.items()
    metrics = (tmp_path / "metrics" / "train.jsonl").read_text().splitlines()
    assert all({"note", "many"}.isdisjoint(json.loads(line)) for line in metrics)
    assert output.count("left out, and the training continues") == 2, "a script may log what is no number"


@pytest.mark.parametrize(
    ("code", "checkpoints"),
    [
        ("train('it', HandlesSignal(), SendsSignal())", ["it/checkpoint-8"]),
        ("thread = threading.Thread(target=train, args=['it'])\nthread.start()\nthread.join()", ["it/checkpoint-8"]),
        (
            "import torchrelay.transformers as ours\ntrain('it', ours.RelayTrainerCallback(), SendsSignal())",
            ["it/checkpoint-4"],
        ),
        ("from torchrelay import state\nwith state():\n    train('it', SendsSignal())", ["it/checkpoint-8"]),
    ],
    ids=["handles signals", "in a thread", "has the callback", "within state"],
)
def test_training_that_needs_no_callback_or_can_have_none_is_left_alone(
    tmp_path: Path, code: str, checkpoints: list[str]
) -> None:
    saved, output = run(tmp_path, code)
    assert saved == checkpoints
    assert "when Slurm stops the job, this Trainer saves" not in output
