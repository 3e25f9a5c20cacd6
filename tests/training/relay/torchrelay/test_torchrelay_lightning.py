"""Lightning's checkpoint if it is a directory in which all ranks write: each save replaces it whole.

The test runs where TORCHRELAY_EXAMPLES names the Python of the examples' environment (examples/README.md).
"""

import os
import subprocess
from pathlib import Path

import pytest
from support.cluster import ROOT
from support.relay_script import agent_variables

LIBRARIES = os.environ.get("TORCHRELAY_EXAMPLES")
# Saves after each step. The words name the step in which rank 0 gets SIGTERM.
SCRIPT = """
import os, signal, sys, torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrelay.lightning import RelayCallback

class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

    def configure_model(self):
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        return (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_batch_start(self, *_):
        if sys.argv[1:] == [str(self.trainer.global_step)] and self.trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
seed_everything(rank)
data = TensorDataset(torch.randn(160, 4, generator=torch.Generator().manual_seed(0)))
loader = StatefulDataLoader(data, batch_size=8, sampler=DistributedSampler(data, ranks, rank))
model, relay = Regression(), RelayCallback(checkpoint_seconds=0.0)
trainer = Trainer(
    accelerator="cpu", devices=ranks, max_epochs=1, callbacks=[relay], logger=False, enable_checkpointing=False,
    enable_progress_bar=False, use_distributed_sampler=False, strategy=ModelParallelStrategy(ranks, 1),
)
trainer.fit(model, loader, ckpt_path=relay.checkpoint, weights_only=False)
weights = [value.full_tensor().tolist() for value in model.parameters()]
if rank == 0:
    with open("final.txt", "w") as file:
        file.write(f"{trainer.global_step} {weights}")
"""


def train(directory: Path, *words: str) -> None:
    """Run an attempt with two ranks."""
    torchrun = [LIBRARIES or "", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    environment = {**os.environ, **agent_variables(directory), "PYTHONPATH": str(ROOT / "training" / "relay")}
    done = subprocess.run(
        [*torchrun, *words], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not LIBRARIES, reason="TORCHRELAY_EXAMPLES does not name a Python with Lightning")
def test_training_continues_with_a_checkpoint_that_is_a_directory(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for run in (whole, stopped):
        run.mkdir()
        (run / "script.py").write_text(SCRIPT)
    train(whole)
    train(stopped, "3")
    assert not (stopped / "final.txt").exists()
    checkpoint = stopped / "lightning.ckpt"
    assert (checkpoint / "meta.pt").exists()
    # What kills leave: between the two renames of a save, and before them.
    checkpoint.rename(stopped / ".lightning.ckpt.0123abcd.old")
    (stopped / ".lightning.ckpt.4567cdef.tmp").mkdir()
    train(stopped)
    assert (stopped / "final.txt").read_text() == (whole / "final.txt").read_text()
    assert [path.name for path in stopped.glob("*lightning.ckpt*")] == ["lightning.ckpt"]
