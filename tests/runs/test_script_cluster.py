"""A user's own script on a real Slurm, submitted by an ordinary user: modules, arguments, signals, tracebacks."""

import json

import pytest
from support.cluster import TWO_NODES, Run, Site, add_script

from hpc.core.files import read_json_lines

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

SHOW = """
import json, os, sys
from package.words import WORD
if __name__ == "__main__":
    print(json.dumps([WORD, *sys.argv[1:]]), flush=True)
"""
ARGUMENTS = ("--n", "4", "--data={data}/train", "{run_dir}", "{attempt}", "{unknown} {}", "$HOME", "--", "--x")


@pytest.mark.parametrize("directory", ["", "src/"], ids=["top", "src"])
def test_module_with_its_own_flags_and_placeholders(ordinary_user: Site, directory: str) -> None:
    site = ordinary_user
    (site.path / "src").mkdir(exist_ok=True)
    add_script(site, f"{directory}package/words.py", "WORD = 'imported'\n")
    add_script(site, f"{directory}package/show.py", SHOW)
    run = site.submit(*TWO_NODES, "--data=data", "--", "-m", "package.show", *ARGUMENTS)
    assert run.directory.name.startswith("show-")
    run.wait_for_state("completed")
    for rank in (0, 1):
        word, *arguments = json.loads(run.directory.rank_log(1, rank).read_text().splitlines()[-1])
        assert arguments.pop(2).startswith("--data=/tmp/torchrelay-")
        assert word == "imported"
        assert arguments == ["--n", "4", str(run.directory.path), "1", "{unknown} {}", "$HOME", "--", "--x"]


# Each rank counts in a file of its own; a signal that it handles makes it save, and exit as it was told.
COUNTS = """
import json, os, signal, sys, time
from pathlib import Path

handled, exit_code, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
run, rank, told = Path(os.environ["TORCHRELAY_RUN_DIR"]), os.environ["RANK"], []
for name in ("TERM", "USR1", "USR2", "INT", "HUP"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
if handled != "none":
    signal.signal(getattr(signal, "SIG" + handled), lambda number, _: told.append(number))
saved = run / f"saved-{rank}"
step = int(saved.read_text()) if saved.exists() else 0
(run / "metrics").mkdir(exist_ok=True)
while step < steps:
    step += 1
    with open(run / "metrics" / f"rank{rank}.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "attempt": int(os.environ["TORCHRELAY_ATTEMPT"])}) + "\\n")
    if told:
        time.sleep(float(rank) * 3)
        saved.write_text(str(step))
        sys.exit(exit_code)
    time.sleep(0.1)
saved.write_text(str(step))
"""


def counted(run: Run, rank: int) -> list[int]:
    return [line["step"] for line in read_json_lines(run.directory.path / "metrics" / f"rank{rank}.jsonl")]


@pytest.mark.parametrize(
    ("handled", "exit_code", "flags"),
    [
        ("USR1", 0, ("--stop-signal=SIGUSR1",)),
        # As a KeyboardInterrupt does; the other rank takes seconds more to save.
        ("INT", 130, ("--stop-signal=INT",)),
        # Slurm sends SIGTERM, and the script knows the time limit's signal alone.
        ("USR2", 0, ()),
    ],
)
def test_script_is_stopped_by_the_signal_that_it_handles(
    ordinary_user: Site, handled: str, exit_code: int, flags: tuple[str, ...]
) -> None:
    add_script(ordinary_user, "counts.py", COUNTS)
    run = ordinary_user.submit(*TWO_NODES, *flags, "--", "counts.py", handled, str(exit_code), "100")
    run.wait("steps", lambda: min(len(counted(run, 0)), len(counted(run, 1))) >= 5)
    ordinary_user.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.wait_for_release()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", "completed"]
    for rank in (0, 1):
        assert counted(run, rank) == list(range(1, 101)), "no step was lost"
    assert not run.events("interruption")


def test_script_that_ignores_every_signal_is_killed_after_the_grace_and_requeued(ordinary_user: Site) -> None:
    add_script(ordinary_user, "counts.py", COUNTS)
    run = ordinary_user.submit(*TWO_NODES, "--grace=3s", "--", "counts.py", "none", "0", "1000000")
    run.wait("steps", lambda: len(counted(run, 0)) >= 5)
    ordinary_user.slurm("scancel", "--signal=USR2", f"{run.job_id}.0")
    run.wait_for_release()
    assert run.status()["attempts"][0]["cause"] == "time_limit"
    first = len(counted(run, 0))
    run.wait("steps of the next attempt", lambda: len(counted(run, 0)) > first + 5)
    assert counted(run, 0)[first] == 1, "it has saved nothing"
    run.cancel()


def test_script_that_fails_at_once_is_given_up_with_its_traceback(ordinary_user: Site) -> None:
    text = "import sys\ndef load(path):\n    return open(path)\nload('/no/such/weights')\n"
    add_script(ordinary_user, "broken.py", text)
    run = ordinary_user.submit(*TWO_NODES, "--name=broken", "--", "broken.py")
    status = run.wait_for_state("failed")
    assert status["traceback"][0] == "Traceback (most recent call last):"
    assert status["traceback"][-1] == "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/weights'"
    shown = ordinary_user.hpc("status", "broken").stdout
    assert "in load\n" in shown
    assert "\nFileNotFoundError: " in shown
