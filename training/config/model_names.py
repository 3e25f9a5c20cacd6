"""Knows the names of models and pretrained weights, and finds the weights in torch's cache.

Runs on every rank and on the login node, which may have internet access that compute nodes lack. The names come from
the source of torchvision or timm, because importing torchvision takes 4 seconds and a login node may lack torch. A list
of our own would fit only one version.
"""

import importlib.util
import os
import re
import shlex
from functools import cache
from pathlib import Path

from hpc.base.errors import UserError, need_package
from hpc.base.files import expanded, sha256_of
from hpc.base.text import did_you_mean

SMALL_CNN = "small-cnn"
OWN_MODELS = (SMALL_CNN, *(f"resnet{depth}" for depth in (20, 32, 44, 56, 110)))
TIMM = "timm:"
"""Prefix of --model for timm's models."""
_REGISTERED = re.compile(
    r"^@register_model(?:\((?:(?:name=)?[\"'](\w+)[\"'])?\))?\n(?:@.*\n)*def (\w+)\(", re.MULTILINE
)


def _sources(package: str) -> list[Path]:
    """Return the source files of a package's models, or no files if the package is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return sorted((Path(places[0]) / "models").glob("*.py")) if places else []


@cache
def models_of(package: str) -> tuple[str, ...]:
    """Return the names of the classifiers of `torchvision` or `timm`, or no names if it is not installed."""
    sources = (source.read_text(encoding="utf-8") for source in _sources(package))
    return tuple(sorted(match[1] or match[2] for source in sources for match in _REGISTERED.finditer(source)))


def check_model(name: str) -> None:
    """Raise UserError, which lists similar names, if there is no model of this name."""
    if name.startswith(TIMM):
        need_package("timm", "timm", f"--model {name}")
        names = tuple(f"{TIMM}{model}" for model in models_of("timm"))
    else:
        names = (*OWN_MODELS, *models_of("torchvision"))
    # A timm model's name may have a suffix, `.` and the name of pretrained weights.
    if (name.partition(".")[0] if name.startswith(TIMM) else name) in names:
        return
    hint = did_you_mean(name, names, f"use {SMALL_CNN} or resnet50")
    raise UserError(f"--model is {name!r}, which is not known: {hint}")


def resolve_weights(model: str, weights: str) -> Path:
    """Return the file of `--weights`, which is a path, or a name of torchvision's weights for the model.

    Raises UserError if the file does not exist or is damaged. The message says how to get it.
    """
    if "/" in weights or weights.endswith((".safetensors", ".pth", ".pt")):
        path = expanded(weights).absolute()
        if not path.is_file():
            raise UserError(
                f"--weights is {weights}, which does not exist: give a file, or a name of torchvision's weights"
            )
        return path
    if model.startswith(TIMM):
        place = "https://huggingface.co/timm"
        raise UserError(f"--weights is {weights!r}: for {model} give a file, such as a model.safetensors of {place}")
    if model in OWN_MODELS:
        raise UserError(f"--weights is {weights!r}, but torchvision has none for {model}: give a file")
    urls = torchvision_weights(model)
    url = urls.get(weights.rpartition(".")[2])
    if url is None:
        raise UserError(f"--weights is {weights!r}, but {model} has {', '.join(urls) or 'none'}: use that, or a file")
    path = cache_directory() / url.rpartition("/")[2]
    command = shlex.join(["curl", "--create-dirs", "-fLo", str(path), url])
    if not path.is_file():
        raise UserError(
            f"--weights {weights} of {model} is not in {path.parent}: where there is internet, type {command}"
        )
    # The names of torchvision's files end with the first digits of their SHA-256.
    if not sha256_of(path).startswith(path.stem.rpartition("-")[2]):
        raise UserError(f"--weights {weights} of {model} is damaged: where there is internet, type {command}")
    return path


def cache_directory() -> Path:
    """Return the directory into which torch.hub downloads weights."""
    caches = expanded(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = expanded(os.environ.get("TORCH_HOME", caches / "torch"))
    return home / "hub" / "checkpoints"


@cache
def torchvision_weights(model: str) -> dict[str, str]:
    """Return the URLs of a torchvision model's weights by name, or an empty dict if torchvision lacks the model."""
    for source in _sources("torchvision"):
        text = source.read_text(encoding="utf-8")
        if function := re.search(rf"^def {model}\(.*?weights: Optional\[(\w+)\]", text, re.MULTILINE | re.DOTALL):
            names = re.search(rf"^class {function[1]}\(WeightsEnum\):\n(.*?)^\S", text, re.MULTILINE | re.DOTALL)
            members = names[1] if names else ""
            urls = dict(re.findall(r'^    (\w+) = Weights\(.*?url="([^"]+)"', members, re.MULTILINE | re.DOTALL))
            default = re.search(r"^    DEFAULT = (\w+)", members, re.MULTILINE)
            return urls | ({"DEFAULT": urls[default[1]]} if default else {})
    return {}
