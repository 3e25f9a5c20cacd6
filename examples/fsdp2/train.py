"""A language model of the bytes of a text: FSDP2 (`fully_shard`), whose shards stay shards.

mkdir text && cat *.md > text/train.txt
hpc submit --nodes 2 --gpus-per-node 4 --data text -- examples/fsdp2/train.py --data {data}

A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last snapshot. The run
may continue with another number of GPUs. `--width 768 --layers 14` makes a model of 100 million parameters.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchrelay import report, should_stop, state

LENGTH = 32


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits of (batch, length, 256)."""
        hidden = self.embedding(text)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="a directory with train.txt")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    text = np.memmap(args.data / "train.txt", dtype=np.uint8, mode="r")  # read from the disk where it is needed
    torch.manual_seed(0)
    model = Transformer(args.width, args.layers).to(device)
    mesh = init_device_mesh(device, (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with state(model=model, optimizer=optimizer) as saved:
        while saved.step < args.steps and not should_stop():
            rng = np.random.default_rng([saved.step, rank])  # its numbers depend on the step alone: no state to save
            places = rng.integers(len(text) - LENGTH, size=8)
            batch = torch.from_numpy(np.stack([text[place : place + LENGTH + 1] for place in places])).long().to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            saved.step += 1
            report(step=saved.step, loss=loss.detach())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
