"""A small GPT in the style of minGPT, configured by Hydra. Runs once per rank.

hpc submit -N 2 --gpus-per-node 4 --python ENV/bin/python -- examples/hydra_gpt/train.py hydra.run.dir={run_dir}/hydra

A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last snapshot, about a
second of work.
"""

import os
import sys

import hydra
import torch
from omegaconf import DictConfig
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchrelay import report, should_stop, state


class GPT(nn.Module):
    """Predicts the next word from those before it."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.places = nn.Parameter(torch.zeros(config.length, config.width))
        layer = nn.TransformerEncoderLayer(config.width, 4, 4 * config.width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.head = nn.Linear(config.width, config.words)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(config.length), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits of (batch, length, words)."""
        return self.head(self.layers(self.words(words) + self.places, mask=self.mask, is_causal=True))


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    """Train."""
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if use_gpu else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(config.model).to(device))
    optimizer = hydra.utils.instantiate(config.optimizer, params=model.parameters())
    torch.manual_seed(1 + distributed.get_rank())

    with state(model=model, optimizer=optimizer) as saved:
        while saved.step < config.steps:
            start = torch.randint(config.model.words, (config.batch_size, 1))
            words = (start + torch.arange(config.model.length + 1)).remainder(config.model.words).to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            saved.step += 1
            report(step=saved.step, loss=loss)
            if should_stop():
                sys.exit(0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
