"""A transformer, sharded by FSDP2 (`fully_shard`), whose state is saved as a whole. Runs once per rank.

hpc submit --nodes 2 --gpus-per-node 4 -- examples/fsdp2/train.py --steps 1000

A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last snapshot, about a
second of work.
"""

import argparse
import os
import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from training.relay import report, should_stop, state

WORDS, LENGTH, WIDTH = 64, 32, 64


class Transformer(nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits of (batch, length, words)."""
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    torch.manual_seed(0)
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + distributed.get_rank())  # its own words for each rank: state() keeps the generator

    with state(model=model, optimizer=optimizer) as saved:
        while saved.step < args.steps:
            start = torch.randint(WORDS, (8, 1))
            words = (start + torch.arange(LENGTH + 1)).remainder(WORDS).to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            saved.step += 1
            report(step=saved.step, loss=loss.detach())
            if should_stop():
                sys.exit(0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
