"""Of a script that reports nothing, `hpc status` and `hpc report` show what is known and call the rest unknown."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.events import claimed, event, interruption, resources_of, script_spec, submitted, write_events
from support.reported_runs import pending_run, report

from hpc.commands.start import status
from hpc.run.rundir import RunDir
from hpc.status import printing
from hpc.status.run_view import summarize


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A script that failed twice and runs for the third time."""
    monkeypatch.setenv("PATH", "/nowhere")
    spec = script_spec(name="r", cluster="local")
    found = pending_run(tmp_path / "r", replace(spec, resources=resources_of(nodes="1", gpus_per_node="2")))
    (found.events / "agent.jsonl").unlink()
    now = time.time()
    write_events(
        found,
        submitted(now - 301),
        claimed(now - 300, nodes=("a1",)),
        interruption(now - 200, step=None, rank=0, node="a1", failed_at=now - 201, detail="disk"),
        interruption(now - 100, step=None, rank=0, node="a1", failed_at=now - 101, detail="network"),
    )
    log = found.rank_log(1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("step 1\nstep 2 \x1b[31mloss\n\n")
    os.utime(log, (now - 70, now - 70))
    return found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert status.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_status_shows_the_last_line_and_that_its_progress_is_unknown(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, str(run.path))
    facts = {line[:11].strip(): line[11:].strip() for line in text.splitlines()}
    assert facts["progress"].startswith("unknown: the script reports no step")
    assert re.fullmatch(r"step 2 \\x1b\[31mloss \(\d+:\d\d ago\)", facts["last output"])
    assert facts["interrupted"] == "2 crashed"
    assert re.fullmatch(r"0\.[12]\d*", facts["GPU-hours"])
    assert "resumed after each of the 2 interruptions is unknown: unless it restores its own checkpoints" in text
    (row,) = json.loads(printed(capsys, str(run.path), "--json"))
    assert 0.16 <= row["gpu_hours"] < 0.17
    assert printing.progress(summarize(run, None)) == "attempt 1: step 2 \x1b[31mloss (interrupted: 2 crashed)"


def test_report_calls_nothing_productive_that_is_not_known_to_be(run: RunDir) -> None:
    html = report(run.path).html
    assert "productive" not in html
    assert re.search(r"<dd>0\.[12]\d*</dd>", html)
    assert "the step from which the script resumed after each of the 2 interruptions is unknown" in html


def test_ranks_on_cpus_are_not_called_gpus(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(run, event("preflight", attempt=1, device="CPU", world_size=2, seconds=0.1))
    text = printed(capsys, str(run.path))
    assert "GPU" not in text
    assert re.search(r"^on CPUs +2 ranks *$", text, re.MULTILINE)
    assert not re.search(r"^device\b", text, re.MULTILINE)
    assert re.search(r"^rank-hours +0", text, re.MULTILINE)
    html = report(run.path).html
    assert "1 node × 2 ranks on CPUs" in html  # noqa: RUF001 - times
    assert "Rank-hours" in html
