"""Generated images: what a training costs when its data cost nothing. Runs on every rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.config.model_names import OWN_MODELS
from training.config.train_config import TrainConfig
from training.data.batch_schedule import BatchRequest
from training.data.dataset import Batch, Data

_STEPS_PER_EPOCH = 100
_MOST_IMAGES = 1024
_CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class SyntheticImages:
    """So many images, all of them from a few that are made once: no request costs more than a look."""

    pool: Tensor
    """uint8 [m, 3, size, size]: noise, in pinned memory where there is a GPU."""
    labels: Tensor
    """int64 [n]"""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, request: BatchRequest) -> Batch:
        """The first images of the pool, whatever is asked for."""
        indices = torch.tensor(request.indices, dtype=torch.int64)
        count = len(indices)
        images = self.pool[:count] if count <= len(self.pool) else self.pool[torch.arange(count) % len(self.pool)]
        return Batch(images, self.labels[indices], indices, torch.empty(0, dtype=torch.int64))

    def name(self, index: int) -> str:
        """`generated image 17`."""
        return f"generated image {index}"


def synthetic_data(config: TrainConfig, size: int) -> Data:
    """Generated images of the size that the model sees, 100 steps of them in an epoch; there is nothing to test on."""
    classes = 10 if config.model in OWN_MODELS else 1000
    shape = (min(config.batch_size, _MOST_IMAGES), _CHANNELS, size, size)
    pool = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(config.seed))
    if torch.cuda.is_available():
        pool = pool.pin_memory()
    labels = torch.arange(_STEPS_PER_EPOCH * config.batch_size) % classes
    return Data(
        train=SyntheticImages(pool=pool, labels=labels),
        val=None,
        test=None,
        classes=tuple(map(str, range(classes))),
        mean=(0.5,) * _CHANNELS,
        std=(0.29,) * _CHANNELS,
        channels=_CHANNELS,
        shape=(size, size),
        in_memory=False,
        cheap=True,
        fingerprint="synthetic",
    )
