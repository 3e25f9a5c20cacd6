"""The callbacks for libraries on a real Slurm: a killed rank and a preemption change no weight, and cost few steps.

The tests are collected where TORCHRELAY_EXAMPLES names the Python of the examples' environment (examples/README.md).
"""

import os
import subprocess

import pytest
from support.cluster import ROOT, TWO_NODES, Run, Site, add_script

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

PYTHON = os.environ.get("TORCHRELAY_EXAMPLES")
STEPS = 400
# Each ends with its weights in `final.pt`. Steps take long enough for the library's checkpoint to be seldom.
LIGHTNING = """
import os, sys, time, torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrelay.lightning import RelayCallback

class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

    def training_step(self, batch, _):
        time.sleep(0.02)
        return (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

seed_everything(0)
data = TensorDataset(torch.randn(640, 4))
rank, ranks, devices = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
loader = StatefulDataLoader(data, batch_size=8, sampler=DistributedSampler(data, ranks, rank))
model, relay = Regression(), RelayCallback(checkpoint_seconds=1.0)
trainer = Trainer(
    accelerator="cpu", devices=devices, num_nodes=ranks // devices, max_epochs=10, callbacks=[relay],
    log_every_n_steps=5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    use_distributed_sampler=False, strategy="ddp",
)
trainer.fit(model, loader, ckpt_path=relay.checkpoint, weights_only=False)
if rank == 0:
    torch.save(model.state_dict(), "final.pt")
"""
TRANSFORMERS = """
import os, time, torch
from torchrelay.transformers import RelayTrainerCallback
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.003)
        return {"input_ids": torch.arange(8) + index % 20, "labels": index % 2}

set_seed(0)
model = BertForSequenceClassification(BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16,
))
arguments = TrainingArguments(
    "output", num_train_epochs=10, per_device_train_batch_size=8, save_steps=30, save_total_limit=2, logging_steps=5,
    report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
)
trainer = Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[RelayTrainerCallback()])
trainer.train(resume_from_checkpoint=get_last_checkpoint("output") if os.path.isdir("output") else None)
if int(os.environ["RANK"]) == 0:
    torch.save(model.state_dict(), "final.pt")
"""
SCRIPTS = {"lightning": LIGHTNING, "transformers": TRANSFORMERS} if PYTHON else {}
COMPARES = """
import sys, torch
one, other = (torch.load(path) for path in sys.argv[1:])
sys.exit(not (one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)))
"""


def interrupt(run: Run, kind: str) -> None:
    """Wait until the script has trained further than its newest checkpoint, and have a failure."""
    seen = len(run.steps())
    run.wait("steps", lambda: len(run.steps()) >= seen + 8)
    done = run.site.hpc("drill", str(run.directory.path), kind, "--yes")
    assert done.returncode == 0, done.stderr + run.evidence()


@pytest.mark.parametrize("name", SCRIPTS)
def test_training_is_the_same_though_interrupted(site: Site, name: str) -> None:
    plain = site.path / "plain"
    plain.mkdir()
    (plain / "train.py").write_text(SCRIPTS[name])
    torchrun = [PYTHON or "", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "training/relay")}
    done = subprocess.run(torchrun, cwd=plain, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    add_script(site, "train.py", SCRIPTS[name])
    run = site.submit(*TWO_NODES, f"--python={PYTHON}", f"--name={name}", "--", "train.py")
    for kind in ("worker-kill", "preempt"):
        interrupt(run, kind)
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]][-2:] == ["preempted", "completed"]
    killed, preempted = status["interruptions"]
    print(f"{name}: a killed rank cost {killed['steps_lost']} steps, a preemption {preempted['steps_lost']}")
    assert preempted["steps_lost"] == 0, "the ranks saved the step after which they agreed to stop"
    assert 0 <= killed["steps_lost"] <= killed["step"]
    assert (status["step"], status["total_steps"]) == (STEPS, STEPS)
    final = run.directory.code / "final.pt"
    same = subprocess.run([PYTHON or "", "-c", COMPARES, str(final), str(plain / "final.pt")], check=False)
    assert same.returncode == 0, "the weights differ"
