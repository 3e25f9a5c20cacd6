"""The same training with Lightning and the callback of `torchrelay.lightning`, as docs/how-to/own-script.md has it.

Under `hpc submit`, Lightning takes its ranks from torchrun.
"""

import argparse
import os

import lightning
from common import arguments, images_of
from lightning_ddp import Classifier, Steps
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrelay.lightning import RelayCallback


def main(args: argparse.Namespace) -> None:
    """Train."""
    relay = RelayCallback()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=args.epochs, default_root_dir=args.output,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, callbacks=[relay, Steps(args.output)],
    )  # fmt: skip
    data = images_of(args.data, args.images)
    sampler = DistributedSampler(data, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    loader = StatefulDataLoader(data, batch_size=args.batch_size // 2, sampler=sampler, drop_last=True)
    trainer.fit(Classifier(args.wait), loader, ckpt_path=relay.checkpoint, weights_only=False)


if __name__ == "__main__":
    main(arguments())
