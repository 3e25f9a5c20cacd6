"""Makes the pictures of README and docs, and the output that two pages show: `make pictures`, as root.

recovery-*.svg: a chart of benchmarks/results/recovery.json. terminal.svg: commands and their output, for a run on the
testbed that is preempted. report-*.png: that run's report in Chromium. What the commands of docs/how-to/sweep.md and
scaling-study.md print is put into these pages.
"""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"
COLUMNS = 108
# The titles of the panels, and the failures as the benchmark calls them.
PANELS = {
    "rank killed": "worker killed",
    "node dies": "node killed",
    "preempted": "preempted",
    "hang (10 s timeout)": "hung",
}
# The benchmark's names, and those in the chart.
CONTENDERS = {
    "script with torchrelay": "Torchrelay, step 2",
    "submitit + torchrun": "submitit + torchrun",
    "ft_launcher": "ft_launcher",
    "Lightning": "Lightning",
    "torchx": "torchx",
}
COLORS = ("#2f81f7", "#8b949e", "#a8adb5", "#c2c6cc", "#dcdfe3")
PAPERS = {"light": ("#ffffff", "#1f2328"), "dark": ("#0d1117", "#e6edf3")}


def in_words(seconds: float) -> str:
    """Write seconds as the tables of the docs do."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def draw_chart() -> None:
    """Seconds until training continues, by failure and tool."""
    rows = json.loads((ROOT / "benchmarks/results/recovery.json").read_text())["rows"]
    found = {(row["failure"], row["contender"]): row for row in rows}
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "torchrelay", "font.family": "sans-serif", "font.size": 10}
    for paper, (background, ink) in PAPERS.items():
        figure, panels = plt.subplots(1, len(PANELS), figsize=(10.5, 2.7), sharey=True, facecolor=background)
        for panel, (title, failure) in zip(panels, PANELS.items(), strict=True):
            seconds = [found[failure, name]["seconds"] for name in CONTENDERS]
            panel.barh(range(len(CONTENDERS)), [value or 0 for value in seconds], color=COLORS)
            for position, name in enumerate(CONTENDERS):
                row = found[failure, name]
                text = "not back" if row["seconds"] is None else in_words(row["seconds"])
                panel.text(row["seconds"] or 0, position, f" {text}", va="center", color=ink, fontsize=9)
            panel.set_title(title, color=ink, fontsize=10, loc="left")
            panel.set_yticks(range(len(CONTENDERS)), CONTENDERS.values(), color=ink)
            panel.set_xlim(0, 1.5 * max(value or 0 for value in seconds))
            panel.set_xticks([])
            panel.set_facecolor(background)
            panel.spines[:].set_visible(False)
            panel.tick_params(length=0)
        panels[0].invert_yaxis()
        conditions = "simulated nodes on 2 CPU cores, Slurm 22.05; each panel has its own scale"
        figure.suptitle(f"Seconds until training continues ({conditions})", color=ink, fontsize=11, x=0.02, ha="left")
        figure.tight_layout()
        figure.savefig(PICTURES / f"recovery-{paper}.svg", metadata={"Date": None}, facecolor=background)
        plt.close(figure)


def typed(directory: Path, *words: str) -> str:
    """What a command prints to a terminal, with its colours."""
    ours, its = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(words, cwd=directory, stdin=its, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        output = b""
        try:
            while part := os.read(ours, 1 << 16):
                output += part
        except OSError:  # the terminal is closed: the command has ended
            pass
        os.close(ours)
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{output.decode()}")
    return output.decode().replace("\r\n", "\n")


def status(directory: Path) -> dict[str, Any]:
    """The document of `hpc status`."""
    done = subprocess.check_output(["hpc", "status", "first", "--json"], cwd=directory)
    return dict(json.loads(done)[0])


def wait_for(directory: Path, key: str, value: Any) -> None:
    """Wait until a field of the status has a value, or a number at least that."""
    deadline = time.monotonic() + 600
    while (status(directory)[key] or 0) < value if isinstance(value, int) else status(directory)[key] != value:
        if time.monotonic() > deadline:
            sys.exit(f"{key} has not become {value}: {status(directory)}")
        time.sleep(1)


def record_terminal(directory: Path) -> None:
    """A run that is submitted, preempted, and has lost no step."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: PTH123, SIM115

    def show(*words: str) -> None:
        console.print(Text.assemble(("$ ", "bold green"), (" ".join(words), "bold")))
        console.print(Text.from_ansi(typed(directory, *words)))

    submit = ("hpc", "submit", "--nodes", "2", "--gpus-per-node", "4", "--recipe", "digits", "--epochs", "100")
    show(*submit, "--name", "first")
    wait_for(directory, "step", 300)
    show("hpc", "drill", "first", "preempt", "--yes")
    show("hpc", "status")
    wait_for(directory, "state", "completed")
    show("hpc", "status")
    (PICTURES / "terminal.svg").write_text(console.export_svg(title="a run that is preempted", unique_id="torchrelay"))


def run_study(directory: Path, verb: str, name: str) -> None:
    """Type the first command of a page, and put what it prints below it."""
    page = ROOT / f"docs/how-to/{name}.md"
    before = page.read_text()
    command, shown = re.findall(rf"(?ms)^(hpc {verb} .*?)```.*?```text\n(.*?)```", before)[0]
    words = shlex.split(command.replace("\\\n", " "))
    output = re.sub(r"\x1b\[[\d;]*m", "", typed(directory, *words))
    lines = [line.rstrip() for line in output.splitlines()]
    table = next(index for index, line in enumerate(lines) if line.startswith(" "))
    # Of what it prints while it runs, the start and the end.
    kept = [*lines[:3], "...", *lines[table - 1 :]] if verb == "sweep" else lines[table:]
    page.write_text(before.replace(shown, "\n".join(kept) + "\n"))


def photograph(page: Path, name: str) -> None:
    """The top of a page, light and dark."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for paper in PAPERS:
            view = browser.new_page(color_scheme=paper, viewport={"width": 1200, "height": 1150})  # type: ignore[arg-type]
            view.goto(page.as_uri())
            view.wait_for_timeout(5000)  # Bokeh draws in its own time
            view.screenshot(path=PICTURES / f"{name}-{paper}.png")
        browser.close()


def main() -> int:
    """Make all pictures, or with --chart the chart alone."""
    PICTURES.mkdir(exist_ok=True)
    draw_chart()
    if "--chart" in sys.argv:
        return 0
    os.environ["PATH"] = f"{ROOT}/.venv/bin:{os.environ['PATH']}"
    directory = Path("/var/tmp/my-project")  # noqa: S108 - this machine is ours alone, and the pictures show the name
    directory.mkdir()
    try:
        subprocess.run(["hpc", "testbed", "up", "--nodes", "4", "--gpus-per-node", "4"], check=True)
        record_terminal(directory)
        subprocess.run(["hpc", "report", "first"], cwd=directory, check=True)
        photograph(directory / "runs/first/report/index.html", "report")
        run_study(directory, "sweep", "sweep")
        run_study(directory, "scaling", "scaling-study")
    finally:
        subprocess.run(["hpc", "testbed", "down"], check=True)
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
