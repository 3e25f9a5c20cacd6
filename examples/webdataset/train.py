"""Tar shards, read by WebDataset: an epoch loop that continues in the middle of an epoch. Runs once per rank.

hpc submit -N 2 --gpus-per-node 4 --data SHARDS --python ENV/bin/python -- examples/webdataset/train.py {data}

SHARDS is a directory of `*.tar`, at least one for each rank. In them, `NAME.jpg` or `NAME.png` is an image, and
`NAME.cls` its class.
A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last snapshot, about a
second of work.
"""

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
import webdataset
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchrelay import report, state
from torchvision.transforms import v2

TO_TENSOR = v2.Compose(
    [v2.ToImage(), v2.Resize((32, 32)), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps-per-epoch", type=int, default=100, help="the same on all ranks")
    parser.add_argument("--classes", type=int, default=10)
    args = parser.parse_args()

    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if use_gpu else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, args.classes))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shards = sorted(str(path) for path in args.shards.glob("*.tar"))

    with state(model=model, optimizer=optimizer) as saved:
        for epoch in saved.epochs(args.epochs):
            # A rank with fewer images than the others begins again, so that all have as many steps.
            samples = webdataset.WebDataset(
                shards, nodesplitter=webdataset.split_by_node, shardshuffle=len(shards), detshuffle=True, seed=epoch
            )
            data = samples.shuffle(100, seed=epoch).decode("pil").to_tuple("jpg;png", "cls").map_tuple(TO_TENSOR)
            loader = webdataset.WebLoader(data.batched(16).repeat(), batch_size=None)
            for images, labels in saved.batches(islice(loader, args.steps_per_epoch)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                report(step=saved.step, epoch=epoch, loss=loss)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
