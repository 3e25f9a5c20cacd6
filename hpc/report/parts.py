"""The building blocks of both kinds of page: the frame, tiles, tables, bars. Pure; runs on the login node."""

from collections.abc import Mapping, Sequence
from importlib import resources

import pandas as pd

from hpc.report.gather import RunRecord
from hpc.report.markup import Markup, join, tag, void
from hpc.report.write import UNKNOWN, duration, moment, number
from hpc.status.downtime import PARTS
from hpc.status.run_view import TERMINAL

# The page may load nothing from anywhere, whatever it shows.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Columns of whole sentences, which wrap.
_LONG = {"what it said": "words", "value": "words"}
_MEANINGS = {
    "notice": "until it was noticed and everything had ended",
    "release": "until the requeue or the new job",
    "start": "in the queue, until the job ran",
    "stage": "staging the data",
    "rendezvous": "until all ranks had started and met",
    "restore": "reading the state back",
    "first_step": "until the first step was done",
}


def document(title: str, *sections: Markup | None) -> str:
    """A whole page."""
    style = resources.files("hpc.report").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        tag("style", Markup(style)),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, tag("body", tag("main", *sections)), lang="en") + "\n"


def section(title: str, *children: str | None, intro: str | None = None) -> Markup:
    """A part of the page with a heading."""
    return tag("section", tag("h2", title), tag("p", intro, class_="soft") if intro else None, *children)


def card(*children: str | None, title: str | None = None) -> Markup:
    """A box, which may have a heading."""
    return tag("div", tag("h3", title) if title else None, *children, class_="card")


def pill(state: str) -> Markup:
    """A run's state."""
    return tag("span", state, class_=f"pill {state}")


def tiles(facts: Sequence[tuple[str, str, str | None]]) -> Markup:
    """Numbers at a glance, each with its name and perhaps a remark."""
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value, tag("small", remark) if remark else None))
            for name, value, remark in facts
        ),
        class_="tiles",
    )


def notes_of(notes: Sequence[str]) -> Markup | None:
    """What is missing or to be heeded."""
    return tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else None


def table(
    name: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = (), stacks: bool = False
) -> Markup:
    """A table, which scrolls in its own box where it is too wide.

    Args:
        name: what it holds, for those who cannot see it.
        header: the columns.
        rows: the cells; the first of each row names it. Columns of which nothing is known are left out.
        left: columns of text; the others are numbers and stand to the right.
        stacks: whether a phone shows the cells of a row one below the other, each with its column's name.
    """
    shown = [place for place in range(len(header)) if any(row[place] != UNKNOWN for row in rows)]
    header, rows = [header[place] for place in shown], [[row[place] for place in shown] for row in rows]
    sides = [_LONG.get(column) if column in left else "number" for column in header]
    head = tag("tr", *(tag("th", column, scope="col", class_=side) for column, side in zip(header, sides, strict=True)))
    body = [
        tag(
            "tr",
            *(
                tag("td" if place else "th", cell, scope=None if place else "row", class_=side, data_label=column)
                for place, (cell, side, column) in enumerate(zip(row, sides, header, strict=True))
            ),
        )
        for row in rows
    ]
    return scrolled(name, tag("table", tag("thead", head), tag("tbody", *body), class_="stacks" if stacks else None))


def scrolled(name: str, content: Markup) -> Markup:
    """A box that scrolls by itself, with the keyboard too: the page never does so sideways."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=name)


def bar(name: str, shares: Mapping[str, float], colors: Mapping[str, str], whole: float) -> Markup:
    """Amounts of time as pieces of one bar, as long as they are of the whole."""
    spoken = ", ".join(f"{part} {duration(seconds)}" for part, seconds in shares.items())
    pieces = [
        tag(
            "i",
            style=f"width:{100 * seconds / whole:.2f}%;background:var(--{colors[part]})",
            title=f"{part} {duration(seconds)}",
        )
        for part, seconds in shares.items()
        if whole > 0 and seconds > 0
    ]
    return tag("div", *pieces, class_="bar", role="img", aria_label=f"{name}: {spoken}")


def legend(items: Sequence[tuple[str, str, str | None]]) -> Markup:
    """Colors with their names and meanings."""
    return tag(
        "ul",
        *(
            tag("li", tag("i", style=f"background:var(--{color})"), tag("b", name), f" {meaning}" if meaning else None)
            for color, name, meaning in items
        ),
        class_="legend",
    )


_PART_COLORS = {part: f"s{place}" for place, part in enumerate(PARTS, 1)}


def lost_time(groups: Mapping[str, pd.DataFrame]) -> Markup | None:
    """The time that interruptions cost, a bar for each group of them, its pieces the parts of the way back."""
    rows = {name: _parts(rows) for name, rows in groups.items() if len(rows)}
    if not rows:
        return None
    longest = max(sum(parts.values()) for parts in rows.values())
    shown = [
        tag(
            "div",
            tag("div", tag("b", name), tag("span", _cost(groups[name]), class_="soft"), class_="spread"),
            bar(name, parts, _PART_COLORS, longest),
        )
        for name, parts in rows.items()
    ]
    used = [part for part in PARTS if any(parts[part] > 0 for parts in rows.values())]
    names = [(_PART_COLORS[part], part.replace("_", " "), _MEANINGS[part]) for part in used]
    return join([tag("div", *shown, class_="bars"), legend(names)])


def _parts(rows: pd.DataFrame) -> dict[str, float]:
    return {part: float(rows[f"{part}_seconds"].sum()) for part in PARTS}


def _cost(rows: pd.DataFrame) -> str:
    total, unknown = rows["total_seconds"].sum(), int(rows["total_seconds"].isna().sum())
    steps = int(rows["steps_lost"].sum())
    parts = [
        f"{len(rows)} interruption{'s' * (len(rows) != 1)}",
        duration(float(total)) + (f" and {unknown} not known" if unknown else ""),
        f"{number(steps)} step{'s' * (steps != 1)} made again",
    ]
    return " · ".join(parts)


def wall_seconds(record: RunRecord, now: float) -> float | None:
    """From the first attempt's begin to the last one's end, or to now."""
    attempts = record.attempts
    if attempts.empty:
        return None
    over = record.last_heard or now if record.summary["state"] in TERMINAL else now
    ended = attempts["ended"].iloc[-1]
    return float((over if pd.isna(ended) else ended) - attempts["started"].iloc[0])


def details(title: str, *children: str | None) -> Markup:
    """Something to open."""
    return tag("details", tag("summary", title), *children)


def code(content: str) -> Markup:
    """Text to copy."""
    return tag("pre", tag("code", content))


def files(tables: Sequence[str]) -> Markup:
    """Links to the tables beside the page."""
    links = [tag("li", tag("a", name, href=name)) for name in tables]
    return tag("ul", *links, class_="files")


def footer(now: float) -> Markup:
    """When and by what it was made."""
    return tag("footer", f"Written by hpc report, {moment(now)}. Times of day are those of the machine that wrote it.")
