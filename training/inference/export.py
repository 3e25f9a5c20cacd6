"""`hpc export MODEL --format torch --output FILE`: writes a trained model as one file, for use elsewhere.

Runs anywhere, as one process. The file is compared with the model on random images before it is written.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from hpc.base import program
from hpc.base.errors import TorchrelayError, UserError
from hpc.base.files import expanded, write_atomic
from hpc.base.flags import Flag
from training.inference.classifier import find_model, load_classifier
from training.inference.exported_model import FORMATS, require_packages
from training.models.factory import first_line

_IMAGES = 64
# Another order of summation changes a probability by about 1e-6; a wrong computation changes it by more.
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Export a trained model as one file that takes the bytes of images and returns the probabilities of the classes.

    The file includes the normalisation but not the crop. The crop is described in `model.json`, which is in the file,
    and applied by `hpc predict FILE IMAGES...`. Before the file is written, it is compared with the model on random
    images. Exit codes: 0 done, 1 failed, 2 your mistake (one line says what to type).
    """

    model: Annotated[str, Flag(metavar="MODEL", is_positional=True)]
    """A run, or its final/ or best/ directory."""
    output: Path
    """The file to write."""
    format: Literal["torch", "onnx"] = "torch"
    """File format.
    - torch: a torch.export program, which needs torch but not this package
    - onnx: for ONNX Runtime and other ONNX tools
    """


def main() -> int:
    """Run the program, and return its exit code."""
    print(export(program.parse(ExportOptions, sys.argv[1:], program.called("training.inference.export"))))
    return 0


def export(options: ExportOptions) -> str:
    """Write the file, and return a description for people.

    Raises UserError if an option cannot work; or TorchrelayError if the exporter fails, the exported model's results
    differ, or the file cannot be written.
    """
    kind = FORMATS[options.format]
    output = expanded(options.output)
    require_packages(kind)
    if output.suffix != kind.suffix:
        raise UserError(f"--output is {options.output}: use a name that ends with {kind.suffix}")
    if not output.parent.is_dir():
        raise UserError(f"--output is {options.output}, but {output.parent} is not a directory: create it")
    classifier = load_classifier(find_model(options.model))
    try:
        content = kind.serialize(classifier)
    except Exception as error:
        # torch's exporters document no exceptions for models that they do not support.
        reason = first_line(error)
        raise TorchrelayError(f"{classifier.card.model} cannot be exported as {options.format}: {reason}") from error
    shape, random = classifier.card.image_shape, torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (_IMAGES, *shape), dtype=torch.uint8, generator=random)
    _, exported = kind.load(content)
    with torch.inference_mode():
        # One image alone, and the others at once.
        differences = [(exported(batch) - classifier(batch)).abs().max() for batch in (images[:1], images[1:])]
    difference = float(torch.stack(differences).max())
    compared = f"on {_IMAGES} random images"
    if not difference <= _TOLERANCE:
        raise TorchrelayError(
            f"nothing was written: {compared} the probabilities of the exported model differ from the model's by up to "
            f"{difference:.3g}, more than {_TOLERANCE:g}"
        )
    try:
        write_atomic(output, content)
    except OSError as error:
        raise TorchrelayError(f"{output} cannot be written ({error}): give another --output") from error
    return (
        f"{output}: {len(content) / 1e6:.1f} MB, input uint8 {['n', *shape]}; {compared} its probabilities differ from "
        f"the model's by at most {difference:.1g}"
    )


if __name__ == "__main__":
    sys.exit(program.run(main))
