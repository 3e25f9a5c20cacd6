"""What every rank needs, for the processes that ranks are forks of to import."""

LIBRARIES = (
    # Optimizers and DDP import it at their first use, and many others with it.
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
MODULES = (
    "training.engine.launch",
    *LIBRARIES,
    "torch.utils.tensorboard",
    "torchvision.models",
    "torchvision.transforms.v2",
)
"""Of our trainer."""
