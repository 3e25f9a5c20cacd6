"""The names of torchvision's pretrained weights, and their files in its cache. Imports neither torch nor torchvision.

Runs on the login node, which may have internet access where the compute nodes have none, and on every rank.
"""

import ast
import importlib.util
import os
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from hpc.core.errors import UserError
from hpc.core.files import sha256_of
from training.config.model_names import OWN_MODELS

_SUFFIXES = (".safetensors", ".pth", ".pt")
_DEFAULT = "DEFAULT"


def resolve_weights(model: str, weights: str) -> Path:
    """The file of `--weights`, which is a path or a name of torchvision's weights for the model.

    Raises:
        UserError: it does not exist; says how to get it.
    """
    if "/" in weights or weights.endswith(_SUFFIXES):
        path = Path(weights).expanduser().absolute()
        if not path.is_file():
            raise UserError(
                f"--weights is {weights}, which does not exist: give a file, or a name of torchvision's weights"
            )
        return path
    if model in OWN_MODELS:
        raise UserError(f"--weights is {weights!r}, but torchvision has none for {model}: give a file")
    return _cached(model, weights)


def _cached(model: str, name: str) -> Path:
    """The file of these weights in torch's cache, after a check of its checksum."""
    known = torchvision_weights(model)
    url = known.get(name.rpartition(".")[2])
    if url is None:
        raise UserError(f"--weights is {name!r}, but {model} has {', '.join(known) or 'none'}: use that, or a file")
    path = cache_directory() / url.rpartition("/")[2]
    command = shlex.join(["curl", "--create-dirs", "-fLo", str(path), url])
    if not path.is_file():
        raise UserError(f"--weights {name} of {model} is not in {path.parent}: where there is internet, type {command}")
    if not _whole(path):
        raise UserError(f"--weights {name} of {model} is damaged: where there is internet, type {command}")
    return path


def _whole(path: Path) -> bool:
    """Whether a file has the checksum in its name: torchvision's names end with the beginning of their SHA-256."""
    return sha256_of(path).startswith(path.stem.rpartition("-")[2])


def cache_directory() -> Path:
    """The directory of torch.hub's downloads."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    home = Path(os.environ.get("TORCH_HOME", caches / "torch")).expanduser()
    return home / "hub" / "checkpoints"


@cache
def torchvision_weights(model: str) -> dict[str, str]:
    """The names of a model's weights with their URLs, read from torchvision's source.

    Empty for a model without weights, and where torchvision is not installed.
    """
    spec = importlib.util.find_spec("torchvision")
    places = spec.submodule_search_locations if spec else None
    for source in sorted((Path(places[0]) / "models").glob("*.py")) if places else []:
        text = source.read_text(encoding="utf-8")
        if f"def {model}(" in text:
            return dict(_weights(ast.parse(text), model))
    return {}


def _weights(tree: ast.Module, model: str) -> Iterator[tuple[str, str]]:
    """The members of the enumeration in the signature of a model's function, with their URLs."""
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == model)
    hint = next(
        (ast.dump(each.annotation) for each in function.args.kwonlyargs if each.arg == "weights" and each.annotation),
        "",
    )
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and f"id='{node.name}'" in hint]
    found: dict[str, str] = {}
    for member in (item for node in classes for item in node.body if isinstance(item, ast.Assign)):
        name, value = ast.unparse(member.targets[0]), member.value
        if isinstance(value, ast.Call):
            found[name] = next(str(ast.literal_eval(word.value)) for word in value.keywords if word.arg == "url")
        elif name == _DEFAULT:
            found[name] = found[ast.unparse(value)]
    yield from found.items()
