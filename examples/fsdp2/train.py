"""A language model of the bytes of a text: FSDP2 (`fully_shard`), each shard saved by `torch.distributed.checkpoint`.

mkdir text && cat *.md > text/train.txt
hpc submit --nodes 2 --gpus-per-node 4 --data text -- examples/fsdp2/train.py --data {data}

A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last checkpoint, at most
`--save-steps`. The run may continue with another number of GPUs. For a model whose state fits into the memory of one
node, `state()` is shorter and saves every second: see the other examples.
"""

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchrelay import report, should_stop

LENGTH, WIDTH = 32, 64


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits of (batch, length, 256)."""
        hidden = self.embedding(text)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


class Checkpoints:
    """The newest two checkpoints of the run, one directory each."""

    def __init__(self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.directory, self.model, self.optimizer = directory, model, optimizer

    def state(self, step: int) -> dict:
        """What is saved; also what it is loaded into."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def complete(self) -> list[Path]:
        """The oldest first. `.metadata` is written last: without it, a crash has interrupted the save."""
        return [path.parent for path in sorted(self.directory.glob("step-*/.metadata"))]

    def restore(self) -> int:
        """Load the newest one. Returns how many steps are done."""
        if not self.complete():
            return 0
        state = self.state(0)
        checkpoint.load(state, checkpoint_id=self.complete()[-1])
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return state["step"]

    def save(self, step: int) -> None:
        """Each rank writes its shard. `checkpoint.async_save` would write while the training goes on."""
        checkpoint.save(self.state(step), checkpoint_id=self.directory / f"step-{step:08d}")
        if distributed.get_rank() == 0:
            for old in self.complete()[:-2]:
                shutil.rmtree(old)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="a directory with train.txt")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-steps", type=int, default=100)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    text = np.memmap(args.data / "train.txt", dtype=np.uint8, mode="r")  # read from the disk where it is needed
    torch.manual_seed(0)
    model = Transformer().to(device)
    mesh = init_device_mesh(device, (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpoints = Checkpoints(Path(os.environ.get("TORCHRELAY_RUN_DIR", ".")) / "fsdp2", model, optimizer)
    step, stop = checkpoints.restore(), False
    while step < args.steps and not stop:
        places = np.random.default_rng([step, rank]).integers(len(text) - LENGTH, size=8)  # no state to save
        batch = torch.from_numpy(np.stack([text[place : place + LENGTH + 1] for place in places])).long().to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        step += 1
        report(step=step, loss=loss.detach())
        stop = should_stop()
        if stop or step % args.save_steps == 0 or step == args.steps:
            checkpoints.save(step)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
