"""What one can choose by name in the optimisation, with a line of help each. Pure; imports no torch.

What the names stand for is in `training.engine.optim` and `training.engine.lr_schedule`, in tables with the same keys.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import tyro

from hpc.core.errors import UserError

OPTIMIZERS = {
    "sgd": "SGD with momentum",
    "adamw": "Adam whose decay is apart from the gradients (Loshchilov and Hutter, 2019)",
    "adam": "Adam (Kingma and Ba, 2015); its decay is a part of the gradients",
}
SCHEDULES = {
    "cosine": "falls to zero along half a cosine",
    "step": "is multiplied by --lr-gamma at --lr-step-epochs",
    "one-cycle": "rises from 1/25 over --warmup-epochs (a third of all is usual) and falls to 1/250,000, along cosines",
    "plateau": "is multiplied by --lr-gamma after --plateau-patience epochs without a lower validation loss",
    "constant": "stays",
}
# Characters of help that names may take before their lines of help.
_WIDEST = 60
SCALE_BATCH = 256
SCALINGS = {
    "none": "--lr is what it is",
    "sqrt": f"--lr is for a batch of {SCALE_BATCH} images, and grows with the square root of --batch-size",
    "linear": f"--lr is for a batch of {SCALE_BATCH} images, and grows with --batch-size (Goyal et al., 2017)",
}


def flag(field: str) -> str:
    """The flag of a field: `--batch-size` of `batch_size`."""
    return "--" + field.replace("_", "-")


def listed(question: str, table: Mapping[str, str]) -> Any:
    """The help of a flag whose values are the names of a table: a line for each."""
    lines = [question, *(f"{name}: {text}" for name, text in table.items())]
    names = "|".join(table)
    return tyro.conf.arg(help="\n".join(lines), metavar=names if len(names) <= _WIDEST else "NAME")


def parse_drops(text: str) -> tuple[int, ...]:
    """Read `30` (every 30 epochs) or `150,225` (these epochs).

    Raises:
        UserError: the text is neither.
    """
    if re.fullmatch(r"\d+(,\d+)*", text):
        epochs = tuple(int(part) for part in text.split(","))
        if epochs[0] > 0 and all(one < other for one, other in pairwise(epochs)):
            return epochs
    raise UserError(f"--lr-step-epochs is {text!r}: use a number such as 30, or rising epochs such as 150,225")
