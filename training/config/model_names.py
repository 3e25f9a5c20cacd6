"""The names of models. Runs on the login node and on every rank; imports neither torch nor torchvision."""

import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path

from hpc.core.errors import UserError

SMALL_CNN = "small-cnn"
OWN_MODELS = {
    SMALL_CNN: "106,000 weights and no normalization: for small images on CPUs",
    **{
        f"resnet{depth}": f"the residual network of {depth} layers for small images (He et al., 2016)"
        for depth in (20, 32, 44, 56, 110)
    },
}


@cache
def torchvision_models() -> tuple[str, ...]:
    """The names of torchvision's classification models, read from its source, because importing it takes 4 seconds.

    Empty where torchvision is not installed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return ()
    sources = sorted((Path(spec.submodule_search_locations[0]) / "models").glob("*.py"))
    registered = re.compile(r"^@register_model\((?:(?:name=)?[\"'](\w+)[\"'])?\)\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
    found = (match for source in sources for match in registered.finditer(source.read_text(encoding="utf-8")))
    return tuple(sorted(match[1] or match[2] for match in found))


def check_model(name: str) -> None:
    """Make sure that a model has this name.

    Raises:
        UserError: none has; lists similar names.
    """
    known = (*OWN_MODELS, *torchvision_models())
    if name in known:
        return
    if len(known) == len(OWN_MODELS):
        raise UserError(f"--model is {name!r}, and torchvision is not installed here: pip install torchvision")
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5) or [SMALL_CNN, "resnet50"]
    raise UserError(f"--model is {name!r}, which is not known: did you mean {', '.join(close)}?")
