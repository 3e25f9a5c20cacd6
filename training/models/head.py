"""The head of a model, which ends with the classes, and the backbone before it. Runs on every rank."""

from torch import nn

from hpc.core.errors import UserError


def last_layer_name(model: nn.Module) -> str:
    """The name of the layer whose outputs are the classes."""
    # SqueezeNet ends with a convolution.
    kinds = (nn.Linear, nn.Conv2d)
    found = [[name for name, module in model.named_modules() if isinstance(module, kind)] for kind in kinds]
    return str((found[0] or found[1])[-1])


def head_name(model: nn.Module) -> str:
    """The name of the model's child that contains the last layer, such as `fc` or `classifier`."""
    return last_layer_name(model).partition(".")[0]


def add_hidden_layer(model: nn.Module, width: int) -> None:
    """Insert a layer before the last one.

    Raises:
        UserError: the last one is a convolution.
    """
    name = last_layer_name(model)
    last = model.get_submodule(name)
    if not isinstance(last, nn.Linear):
        raise UserError(f"--head-hidden is {width}, but the last layer of this model is a {type(last).__name__}: use 0")
    first, second = nn.Linear(last.in_features, width), nn.Linear(width, last.out_features)
    model.set_submodule(name, nn.Sequential(first, nn.ReLU(), second))


def freeze_backbone(model: nn.Module) -> None:
    """Require gradients of the head alone."""
    head = model.get_submodule(head_name(model))
    model.requires_grad_(requires_grad=False)
    head.requires_grad_(requires_grad=True)


def set_train_mode(model: nn.Module) -> None:
    """`model.train()`, except for frozen parts: their batch statistics do not change."""
    model.train()
    for part in model.children():
        parameters = list(part.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            part.eval()
