"""A table with only the columns that fit a terminal, each row in one line. Pure; runs on the login node."""

from collections.abc import Collection, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

_ALWAYS_SHOWN = 2


def fitting_table(
    console: Console,
    rows: Sequence[Mapping[str, Text]],
    titles: Sequence[str],
    *,
    numbers: Collection[str],
    cut: tuple[str, int],
) -> Table:
    """Return a table of the first, most important columns: all that fit, but at least two.

    Args:
        console: the terminal.
        rows: the cells by title.
        titles: the columns in their order.
        numbers: the columns to align to the right.
        cut: the column whose text is cut if there is too little room, and its least width.
    """
    widths = {title: max(cell_len(title), *(row[title].cell_len for row in rows)) for title in titles}
    name, whole = cut[0], widths[cut[0]]
    widths[name] = min(whole, cut[1])
    shown = list(titles)
    while len(shown) > _ALWAYS_SHOWN and _total(shown, widths) > console.width:
        shown.pop()
    widths[name] = min(whole, widths[name] + max(0, console.width - _total(shown, widths)))
    drawn = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1), header_style="bold")
    for title in shown:
        justify: JustifyMethod = "right" if title in numbers else "left"
        drawn.add_column(title, justify=justify, overflow="ellipsis", no_wrap=True, max_width=widths[title])
    for row in rows:
        drawn.add_row(*(row[title] for title in shown))
    return drawn


def _total(titles: Sequence[str], widths: Mapping[str, int]) -> int:
    return sum(widths[title] for title in titles) + len(titles) - 1
