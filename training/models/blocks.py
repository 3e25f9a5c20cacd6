"""Finds the blocks of a model, to shard, recompute or train each at its own rate. Runs on every rank."""

from collections.abc import Iterator

from torch import nn

from training.models.factory import last_layer_names


def is_row(module: nn.Module) -> bool:
    """Return whether a module is a Sequential or a list. A list is a module without a forward."""
    return isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward


def row_members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of Sequentials and lists in a module, but none inside another member."""
    for child in module.children():
        if is_row(module) and not is_row(child):
            yield child
        else:
            yield from row_members(child)


def blocks_in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of Sequentials and lists, and the layers outside of them, in the order of the model's code."""
    for child in module.children():
        is_member = is_row(module) and not is_row(child)
        # timm's stages are modules that hold a row named `blocks`.
        is_stage = isinstance(getattr(child, "blocks", None), nn.Sequential | nn.ModuleList)
        if (is_member and not is_stage) or not any(is_row(part) for part in child.modules()):
            yield child
        else:
            yield from blocks_in_order(child)


def depths(model: nn.Module) -> dict[str, int]:
    """Return for each parameter, by name, the number of blocks before it in the order of the model's code.

    Norms and embeddings belong to the block before them, or to the first one. The last layers are a block.
    """
    block_of: dict[nn.Parameter, nn.Module] = {}
    last_layers = nn.ModuleList(map(model.get_submodule, last_layer_names(model)))
    of_last_layers = dict.fromkeys(last_layers.parameters(), last_layers)
    for block in blocks_in_order(model):
        if any(parameter.dim() > 1 and parameter not in of_last_layers for parameter in block.parameters()):
            block_of.update(dict.fromkeys(block.parameters(), block))
    block_of |= of_last_layers
    depth_of: dict[str, int] = {}
    begun: list[nn.Module] = []
    for name, parameter in model.named_parameters():
        if parameter in block_of and block_of[parameter] not in begun[-1:]:
            begun.append(block_of[parameter])
        depth_of[name] = max(len(begun) - 1, 0)
    return depth_of
