"""A training loop as people write it by hand, for `benchmarks/scaling`: torchrun starts it, one rank per node.

DistributedDataParallel with its defaults on ResNet-18 and one batch that stays the same, so it loads nothing. Rank 0
writes a line of JSON after each step.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True, help="per rank")
    parser.add_argument("--image-size", type=int, required=True)
    parser.add_argument("--bf16", action="store_true", help="compress the gradients")
    parser.add_argument("--steps-file", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(resnet18(num_classes=1000))
    if options.bf16:
        model.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    labels = torch.randint(1000, (options.batch_size,))
    with options.steps_file.open("a") as log:
        step = 0
        while True:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                log.write(json.dumps({"step": step, "loss": loss.item(), "time": time.time()}) + "\n")
                log.flush()


if __name__ == "__main__":
    main()
