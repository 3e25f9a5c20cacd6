"""A table with only the columns that fit a terminal, each row in one line. Pure; runs on the login node."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

_ALWAYS_SHOWN = 2


def fitting_table(
    console: Console,
    rows: Sequence[Mapping[str, Text]],
    titles: Sequence[str],
    *,
    numbers: Collection[str],
    cut: tuple[str, int],
) -> Group:
    """Return a table of the first, most important columns: all that fit, but at least two.

    It consists of text, because rich takes 0.4 s to print a Table of 200 runs, and 0.1 s for the text.

    Args:
        console: the terminal.
        rows: the cells by title. They are changed.
        titles: the columns in their order.
        numbers: the columns to align to the right.
        cut: the column whose text is cut if there is too little room, and its least width.
    """
    for cell in chain.from_iterable(row.values() for row in rows):
        cell.expand_tabs(1)
    widths = {title: max([cell_len(title), *(row[title].cell_len for row in rows)]) for title in titles}
    name, whole = cut[0], widths[cut[0]]
    widths[name] = min(whole, cut[1])
    shown = list(titles)
    while len(shown) > _ALWAYS_SHOWN and _total(shown, widths) > console.width:
        shown.pop()
    widths[name] = max(1, min(whole, widths[name] + console.width - _total(shown, widths)))

    def line(row: Mapping[str, Text]) -> Text:
        for title in shown:
            row[title].truncate(widths[title], overflow="ellipsis")
            row[title].align("right" if title in numbers else "left", widths[title])
        drawn = Text(" ").join(row[title] for title in shown)
        drawn.rstrip()
        return drawn

    header = {title: Text(title, style="bold") for title in shown}
    return Group(Text("\n", no_wrap=True, overflow="crop").join(map(line, [header, *rows])))


def _total(titles: Sequence[str], widths: Mapping[str, int]) -> int:
    return sum(widths[title] for title in titles) + len(titles) - 1
