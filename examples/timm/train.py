"""timm's models, optimizers, schedules and average of the weights, on a folder of images. Runs once per rank.

hpc submit --nodes 2 --gpus-per-node 4 --data PHOTOS --python ENV/bin/python -- examples/timm/train.py {data}

PHOTOS is a directory with `train/CLASS/*.jpg`.
A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last snapshot, about a
second of work.
"""

import argparse
from pathlib import Path

import timm
import torch
from timm import utils
from timm.data import create_transform, resolve_model_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchrelay import report, state
from torchvision.datasets import ImageFolder


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = utils.init_distributed_device(args)
    torch.manual_seed(0)
    model = timm.create_model(args.model)
    transform = create_transform(**resolve_model_data_config(model), is_training=True)
    data = ImageFolder(args.data / "train", transform)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=args.workers)
    model.reset_classifier(len(data.classes))
    model.to(device)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05)
    schedule, epochs = create_scheduler_v2(optimizer, "cosine", num_epochs=args.epochs, updates_per_epoch=len(loader),
                                           step_on_epochs=False)  # fmt: skip
    model = DistributedDataParallel(model)
    average = utils.ModelEmaV3(model, decay=0.99)
    loss_of = LabelSmoothingCrossEntropy(0.1)

    with state(model=model, average=average, optimizer=optimizer, schedule=schedule) as saved:
        for epoch in saved.epochs(epochs):
            sampler.set_epoch(epoch)
            for images, labels in saved.batches(loader):
                optimizer.zero_grad()
                loss = loss_of(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                schedule.step_update(saved.step)
                average.update(model, step=saved.step)
                report(step=saved.step, epoch=epoch, loss=loss, lr=optimizer.param_groups[0]["lr"])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
