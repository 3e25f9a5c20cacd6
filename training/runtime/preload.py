"""What every rank of the trainer needs, for the processes that ranks are forks of to import."""

MODULES = (
    "training.engine.launch",
    # Optimizers and DDP import it at their first use, and many others with it.
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "torchvision.models",
    "torchvision.transforms.v2",
)
