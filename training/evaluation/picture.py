"""The confusion matrix as a picture. Runs on rank 0 when a training is complete.

Drawn with Pillow, which every rank has loaded: matplotlib would take longer to import than a small test takes.
"""

import io
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# With more classes nobody reads their names: what is left is a map, of this many pixels at most.
_MOST_NAMED, _MAP_PIXELS = 50, 1000
_CELL, _MARGIN, _FONT_SIZE = 44, 12, 13
_LONGEST_NAME = 28
_TOLD = "rows: what images are; columns: what they were taken for"
_PAPER, _INK, _SOFT = (255, 255, 255), (30, 30, 30), (110, 110, 110)
_RIGHT, _WRONG = (26, 110, 62), (178, 34, 34)


def confusion_png(confusion: Tensor, classes: Sequence[str]) -> bytes:
    """A picture of the confusion (int64 [n, n]): rows are what images are, columns what they were taken for.

    Colors are shares of a row, green where right and red where wrong; of few classes with the counts.
    """
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    image = _table(confusion, shares, classes) if len(classes) <= _MOST_NAMED else _map(shares)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _colors(shares: Tensor) -> Tensor:
    """uint8 [n, n, 3]. By the root, mistakes of a few percent can be seen."""
    strength = shares.sqrt()[..., None].float()
    ink = torch.tensor(_WRONG, dtype=torch.float32).expand(*shares.shape, 3).clone()
    ink[range(len(shares)), range(len(shares))] = torch.tensor(_RIGHT, dtype=torch.float32)
    return (255 + (ink - 255) * strength).round().to(torch.uint8)


def _map(shares: Tensor) -> Image.Image:
    """A square for each pair of classes."""
    image = Image.fromarray(_colors(shares).numpy())
    side = max(1, _MAP_PIXELS // len(shares)) * len(shares)
    return image.resize((side, side), Image.Resampling.NEAREST)


def _table(confusion: Tensor, shares: Tensor, classes: Sequence[str]) -> Image.Image:
    """The squares with their counts, beside and below the names of the classes."""
    font = ImageFont.load_default(_FONT_SIZE)
    names = [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..." for name in classes]
    widest = max(round(font.getlength(name)) for name in [*names, "true class"])
    left, side = widest + 2 * _MARGIN, _CELL * len(names)
    width = max(left + side, round(font.getlength(_TOLD)) + _MARGIN) + _MARGIN
    image = Image.new("RGB", (width, side + widest + 3 * _MARGIN + _FONT_SIZE), _PAPER)
    squares = Image.fromarray(_colors(shares).numpy()).resize((side, side), Image.Resampling.NEAREST)
    image.paste(squares, (left, _MARGIN))
    draw = ImageDraw.Draw(image)
    for place, name in enumerate(names):
        middle = _MARGIN + _CELL * place + _CELL // 2
        draw.text((left - _MARGIN, middle), name, _INK, font, anchor="rm")
        _write_upwards(image, name, font, (left + _CELL * place, side + 2 * _MARGIN))
        for column, count in enumerate(confusion[place].tolist()):
            strong = float(shares[place, column]) > 1 / 4
            color = _PAPER if strong else (_INK if count else _SOFT)
            at = (left + _CELL * column + _CELL // 2, middle)
            draw.text(at, _short(count), color, font, anchor="mm")
    draw.text((_MARGIN, image.height - _MARGIN), _TOLD, _SOFT, font, anchor="ls")
    return image


def _write_upwards(
    image: Image.Image, text: str, font: "ImageFont.FreeTypeFont | ImageFont.ImageFont", at: tuple[int, int]
) -> None:
    """A name under its column, read from the bottom to the top and ending there."""
    length = round(font.getlength(text))
    strip = Image.new("RGB", (max(1, length), _CELL), _PAPER)
    ImageDraw.Draw(strip).text((0, _CELL // 2), text, _INK, font, anchor="lm")
    image.paste(strip.transpose(Image.Transpose.ROTATE_90), at)


def _short(count: int) -> str:
    """A count that fits into its square."""
    return str(count) if count < 100_000 else f"{count // 1000}k"
