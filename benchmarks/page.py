"""Writes the measured tables of README and docs from `benchmarks/results`: `python -m benchmarks.page`.

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`. `make bench` ends with this script, and a test says
whether each table is that of the results, so no number is ever edited by hand.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness import RESULTS, ROOT, Row, markdown
from benchmarks.recovery.contenders import CLASSIFIER_TITLE as CLASSIFIER
from benchmarks.recovery.contenders import CONTENDERS

PAGES = ("README.md", "docs/explanation/performance.md", "docs/explanation/recovery.md", "docs/how-to/own-script.md")
_TABLE = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

SCRIPT, UNCHANGED, SPARE, SUBMITIT = (CONTENDERS[key].title for key in ("ours", "unchanged", "spare", "submitit"))
_FAILURES = {
    "worker killed": "a process is killed", "hung": "a process hangs", "node killed": "a node dies",
    "first node killed": "the first node dies", "preempted": "preemption, 20 s of notice",
}  # fmt: skip
_BENCHMARKS = ("recovery", "drill", "storm", "overhead", "speed", "snapshots", "step_counter", "commands")


def result(name: str) -> dict[str, Any]:
    """Return what a benchmark has recorded."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown whose first column has words, and the others numbers."""
    return markdown(columns, rows, [index > 0 for index in range(len(columns))])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def machines() -> str:
    """Return where, when and with which versions the page was measured; the benchmarks may differ in the day alone."""
    found = [result(name) for name in _BENCHMARKS]
    facts = ("processor", "cores", "memory_gib", "slurm", "python", "torch", "commit")
    [shared, *others] = dict.fromkeys(tuple(each["machine"][key] for key in facts) for each in found)
    if others:
        raise SystemExit(f"the results are not those of one state: {shared} and {others[0]}: type make bench")
    processor, cores, memory, slurm, python, torch, commit = shared
    days = sorted({each["machine"]["date"] for each in found})
    rivals = result("recovery")["rivals"] | result("speed")["rivals"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(rivals.items()) if name != "torch")
    when = f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, at commit `{commit}`"
    where = f"{cores} cores of an {processor.replace('(R)', '')} with {memory} GB of memory, without a GPU"
    software = f"Debian 12, Slurm {slurm.rpartition(' ')[2]}, Python {python}, torch {torch}"
    return f"Measured on {when}, on {where}.\n\n{software}; {versions}."


def _costs() -> dict[tuple[str, str], Row]:
    return {(row["failure"], row["contender"]): row for row in result("recovery")["rows"]}


def _cell(row: Row | None) -> str:
    """Return the cost of an interruption, and its parts."""
    if row is None:
        return "-"
    if row["cost_s"] is None:
        return "not back"
    return f"**{_number(row['cost_s'])}** ({_number(row['seconds'])} + {row['steps_lost']} steps)"


def recovery() -> str:
    """Return what each interruption costs each contender."""
    costs = _costs()
    contenders = (SCRIPT, UNCHANGED, CLASSIFIER, SUBMITIT, "ft_launcher", "Lightning", "torchx")
    rows = [[words, *(_cell(costs.get((kind, name))) for name in contenders)] for kind, words in _FAILURES.items()]
    spare = costs.get(("node killed", SPARE))
    return _table(("seconds lost", *contenders), [*rows, ["a node dies, with a spare", _cell(spare), *["-"] * 6]])


def _epoch() -> tuple[int, float]:
    """Return the steps of an epoch of the script, and the median seconds of a step."""
    rows = [row for (_, name), row in _costs().items() if name == UNCHANGED and row["steps_lost"]]
    return result("recovery")["epoch_steps"], median(row["work_lost_s"] / row["steps_lost"] for row in rows)


def repetitions() -> str:
    """Return how often each contender met each interruption, and how long a step takes."""
    times = sorted({row["times"] for row in result("recovery")["rows"] if row["cost_s"] is not None})
    steps, seconds = _epoch()
    runs = f"Medians of {' to '.join(map(str, {times[0]: 0, times[-1]: 0}))} runs; a tool that was not back ran once."
    return f"{runs} An epoch has {steps} steps of {seconds:.2f} s."


def first_screen() -> str:
    """Return README's table."""
    costs, kinds = _costs(), ("worker killed", "node killed", "preempted")
    contenders = {SUBMITIT: SUBMITIT, UNCHANGED: "Torchrelay, step 1", SCRIPT: "Torchrelay, step 2"}
    rows = [[_FAILURES[kind], *(f"{costs[kind, name]['cost_s']:.0f}" for name in contenders)] for kind in kinds]
    steps, seconds = _epoch()
    note = f"In the first two columns, the script saves after each epoch of {steps * seconds:.0f} s."
    return f"{_table(('seconds lost (downtime + repeated steps)', *contenders.values()), rows)}\n\n{note}"


def own_recovery() -> str:
    """Return the standstill and the lost steps of a script and of the classifier."""
    costs = _costs()
    columns = (
        "interruption", "your script: s to next step", "steps lost", "unchanged script: s", "steps lost",
        "classifier: s", "steps lost",
    )  # fmt: skip
    rows = []
    for kind, words in _FAILURES.items():
        cells = list[str]()
        for name in (SCRIPT, UNCHANGED, CLASSIFIER):
            row = costs.get((kind, name))
            cells += [_number(row["seconds"]), f"{row['steps_lost']} ({row['work_lost_s']} s)"] if row else ["-", "-"]
        rows.append([words, *cells])
    return _table(columns, rows)


def lightning() -> str:
    """Return what an interruption costs a script of Lightning, without and with the callback."""
    costs, names = _costs(), ("Lightning", CONTENDERS["callback"].title)
    rows = [
        [_FAILURES[kind], *(_cell(costs[kind, name]) for name in names)] for kind, name in costs if name == names[1]
    ]
    return _table(("seconds lost", *names), rows)


def drill() -> str:
    """Return the seconds of each phase of an interruption of the classifier, which trains alone."""
    phases = {
        "detection": ("notice",), "new job, staging": ("release", "start", "stage"), "start of ranks": ("rendezvous",),
        "restore, first step": ("restore", "first_step"), "total": ("total",),
    }  # fmt: skip
    rows = [
        [row["what"], *(f"{sum(row[part] for part in parts):.1f}" for parts in phases.values())]
        for row in result("drill")["rows"]
    ]
    return _table(("interruption", *phases), rows)


def storm() -> str:
    """Return the goodput of each contender in each storm."""
    columns = (
        "tool", "storm", "without interruptions, s", "with, s", "complete", "steps", "recomputed", "met", "goodput",
    )  # fmt: skip
    keys = (
        "contender", "storm", "without_failures_s", "in_the_storm_s", "complete", "steps", "recomputed", "failures",
        "goodput",
    )  # fmt: skip
    return _table(columns, [[row[key] for key in keys] for row in result("storm")["rows"]])


def overhead() -> str:
    """Return what a training costs when nothing fails."""
    found = result("overhead")
    numbers = ("images/s", "CPU of a step, ms", "memory of a node, MB")
    rows = [
        [
            row["training"], f"{row['start, s']:.1f} ({row['least start, s']} to {row['most start, s']})",
            *(f"{_number(row[name])} ({row[name + ', ratio']:.2f})" for name in numbers),
        ]
        for row in found["rows"]
    ]  # fmt: skip
    [torch] = found["import"]
    note = f"The import of torch alone takes {torch['import of torch, s']:.1f} s."
    return f"{_table(('training', 'start, s (range)', *numbers), rows)}\n\n{note}"


def speed() -> str:
    """Return the images per second of each loop."""
    rows = result("speed")["rows"]
    cases = list(dict.fromkeys((row["model"], row["images"]) for row in rows))
    loops = list(dict.fromkeys(row["loop"] for row in rows))
    by_case = {(row["model"], row["images"], row["loop"]): row for row in rows}

    def cell(case: tuple[str, str], loop: str) -> str:
        row = by_case.get((*case, loop))
        return f"{row['images_per_second']:,.0f} ({row['by_hand_written']:.2f}), {row['mib']}" if row else "-"

    names = {"ours": "Torchrelay", "torchvision": "torchvision's style"}
    return _table(
        ("loop", *(", ".join(case) for case in cases)),
        [[names.get(loop, loop), *(cell(case, loop) for case in cases)] for loop in loops],
    )


def snapshots() -> str:
    """Return what a snapshot costs."""
    rows = result("snapshots")["rows"]
    columns = (
        "model", "MB a rank", "a copy in memory, ms", "CPU time, ms: classifier", "script", "`async_save`",
        "training waits, ms: script", "`async_save`",
    )  # fmt: skip
    table = []
    for model, ranks in dict.fromkeys((row["model"], row["ranks"]) for row in rows):
        by = {row["saved_by"]: row for row in rows if (row["model"], row["ranks"]) == (model, ranks)}
        script, rival = by["script"], by["async_save"]
        costs = [_number(by[name]["cost_ms"]) if name in by else "-" for name in ("classifier", "script", "async_save")]
        stalls = [_number(each["stall_ms"]) for each in (script, rival)]
        name = model if ranks == 1 else f"{model}, {ranks} nodes"
        table.append([name, f"{script['rank_mb']:,.1f}", f"{script['copy_ms']:.1f}", *costs, *stalls])
    return _table(columns, table)


def step_counter() -> str:
    """Return what it costs to count a step."""
    by = {row["steps"]: row for row in result("step_counter")["rows"]}
    microseconds = by["counted - plain, in pairs"]["median_us"]
    return f"It takes {microseconds:.1f} µs of CPU time a step (median of pairs, `python -m benchmarks.step_counter`)."


def commands() -> str:
    """Return what commands cost who types them."""
    rows = [
        [f"`{row['command']}`" if row["command"].startswith("hpc") else row["command"], row["seconds"], row["CPU, s"],
         row["peak memory, MB"]]
        for row in result("commands")["rows"]
    ]  # fmt: skip
    return _table(("command", "median, s", "CPU, s", "peak memory, MB"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "machines": machines, "recovery": recovery, "repetitions": repetitions, "first screen": first_screen,
    "own recovery": own_recovery, "lightning": lightning, "drill": drill, "storm": storm, "overhead": overhead,
    "speed": speed, "snapshots": snapshots, "step counter": step_counter, "commands": commands,
}  # fmt: skip


def _filled(match: "re.Match[str]") -> str:
    return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"


def page_of(name: str) -> str:
    """Return the text of a page with the tables of the results."""
    return _TABLE.sub(_filled, (ROOT / name).read_text(encoding="utf-8"))


def main() -> None:
    """Write all pages."""
    for name in PAGES:
        (ROOT / name).write_text(page_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
