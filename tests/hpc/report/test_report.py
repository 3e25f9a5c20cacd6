"""What `hpc report` writes: pages and tables, whatever a run directory lacks."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from msgspec import structs
from support.events import (
    attempt_ended,
    claimed,
    interruption,
    of_training,
    recovery_of,
    resources_of,
    script_spec,
    submitted,
    write_events,
)
from support.reported_runs import (
    BEGAN,
    COMMIT,
    HOSTILE,
    STEPS,
    Written,
    completed_run,
    pending_run,
    report,
    running_run,
    spec_of,
)

from hpc.base import program
from hpc.base.files import append_json_line, json_line
from hpc.commands.start import status
from hpc.report.gather import gather
from hpc.report.page import submit_command
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.status.printing import progress, summaries
from hpc.status.run_view import summarize
from hpc.submissions.options import submit_flags
from training.config.train_config import TrainConfig
from training.evaluation.final_files import confusion_csv

Capture = pytest.CaptureFixture[str]


FIGURES = ["Loss", "Accuracy (%)", "Images per second", "Learning rate", "Waiting for data (%)"]


def copied(run: RunDir, directory: Path) -> RunDir:
    """A copy of a run, to be changed."""
    shutil.copytree(run.path, directory / run.name)
    return RunDir(directory / run.name)


def facts(html: str) -> dict[str, str]:
    """Names and values in the head of a page."""
    found = re.search(r'<dl class="facts">(.*?)</dl>', html, re.DOTALL)
    assert found
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", found[1]))


def headings(html: str) -> list[str]:
    return re.findall(r"<h[123]>(.*?)</h[123]>", html)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A complete run, which tests read only."""
    return completed_run(tmp_path_factory.mktemp("whole") / "r")


@pytest.fixture(scope="module")
def page(whole: RunDir) -> Written:
    """Its report."""
    return report(whole.path)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The comparison of two complete runs, of which the first has a page of its own."""
    runs = tmp_path_factory.mktemp("compared") / "runs"
    first, _ = (completed_run(runs / name, loss) for name, loss in (("first", 2.0), ("second", 3.0)))
    report(first.path)
    return report("first", "second", "--runs-dir", runs)


def test_page_of_a_run_has_everything_and_loads_nothing(page: Written) -> None:
    html = page.html
    wanted = [
        *("r", "Training", *FIGURES),
        *("Test", "Confusion matrix", "Interruptions and attempts", "Reproduce it"),
    ]
    assert headings(html) == wanted
    assert "85.00%<small>of the final model: the one to publish</small>" in html
    assert "87.50%" not in html, "one accuracy to publish"
    assert "1 min 28 s<small>2 steps recomputed</small>" in html
    assert re.findall(r'data-label="longest parts \(s\)">(.*?)<', html) == [
        "notice 1.0, first step 1.0", "start 66.0, notice 2.0, first step 1.0"
    ]  # fmt: skip
    addresses = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', html)
    outside = [found for pair in addresses for found in pair if found and not found.startswith("#")]
    assert outside == ["train.csv", "eval.csv", "attempts.csv", "interruptions.csv"]
    assert "http" not in re.sub(r"http-equiv", "", html)


def test_no_cell_of_a_table_is_a_formula(whole: RunDir, tmp_path: Path) -> None:
    names = ("=1+1", "-2", "@SUM(A1)")
    run = copied(whole, tmp_path)
    labels = torch.tensor([0] * 4 + [1] * 4 + [2] * 7)
    predicted = torch.tensor([0, 0, 0, 1] + [1] * 4 + [0, 0] + [2] * 5)
    run.confusion.write_text(confusion_csv(labels, predicted, names))
    write_events(run, interruption(BEGAN + 132, "+hang", step=120, failed_at=BEGAN + 130, detail="=cmd()"))
    written = report(run.path)
    tables = {path.name: pd.read_csv(path, dtype=str, keep_default_na=False) for path in written.tables}
    assert {"'=cmd()"} <= set(tables["interruptions.csv"]["detail"])
    assert {"'+hang"} <= set(tables["interruptions.csv"]["cause"])
    for name in names:
        assert f">{name}<" in written.html, "the page shows the name of the class"
    line = {"step": 401, "epoch": 5, "loss": -0.5, "attempt": 2, "time": BEGAN + 505, "=2+2": 1}
    append_json_line(run.train_metrics, line)
    train = pd.read_csv(report(run.path).tables[0])
    assert train.columns[-1] == "'=2+2"
    losses = train["loss"]
    assert losses.dtype == float
    assert losses.iloc[-1] == -0.5


def test_text_from_files_is_escaped(page: Written) -> None:
    html, scripts = page.html, re.findall(r"<script\b[^>]*>", page.whole)
    assert scripts[-3:] == ['<script type="application/json" id="plots">', *["<script>"] * 2]
    assert "&lt;script&gt;alert(1)" in html
    assert "<script" not in html
    assert "<img src=x" not in html
    assert "&amp;amp;" in html, "text is escaped that looks escaped already"


def test_tables_read_back_with_pandas(page: Written) -> None:
    tables = {path.name: pd.read_csv(path) for path in page.tables}
    assert {path.parent for path in page.tables} == {page.path.parent}
    assert tables["train.csv"]["step"].tolist() == list(range(2, STEPS + 1, 2))
    assert tables["train.csv"]["step"].dtype == "int64"
    assert tables["eval.csv"]["split"].tolist() == ["val"] * 4 + ["test"]
    assert tables["attempts.csv"]["cause"].tolist() == ["preempted", "completed"]
    lost = tables["interruptions.csv"]
    assert lost["cause"].tolist() == ["crashed", "preempted"]
    assert lost["steps_lost"].tolist() == [2, 0]
    assert lost["total_seconds"].tolist() == [10.0, 78.0]
    assert lost["detail"].tolist()[0] == HOSTILE
    assert all((table["run"] == "r").all() for table in tables.values())


def test_several_runs_are_compared_beside_their_directories(compared: Written) -> None:
    html = compared.html
    assert compared.path.parts[-3:] == ("runs", "report", "index.html")
    assert headings(html)[:4] == ["2 runs compared", "Results", "Settings that differ", "Training"]
    assert 'href="../first/report/index.html"' in html
    assert "second/report" not in html, "it has no own page yet"
    assert "The runs have the same settings." in html
    train = pd.read_csv(compared.tables[0])
    assert train.groupby("run").size().to_dict() == {"first": 200, "second": 200}


def titles(table: str) -> list[str]:
    return re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", table)


def test_settings_that_differ_are_shown(tmp_path: Path) -> None:
    specs = replace(spec_of("a"), id="1"), replace(spec_of("b", lr=0.25, image_size=224), id="2")
    html = report(*[running_run(tmp_path / one.name, spec=one).path for one in specs]).html
    results, settings = re.findall(r'<table class="stacks sortable">.*?</table>', html, re.DOTALL)
    assert titles(results)[:5] == ["run", "state", "best validation", "training loss", "step"]
    assert titles(settings) == ["run", "lr", "image-size"]
    for name, values in (("lr", ["default", "0.25"]), ("image-size", ["default", "224"])):
        assert re.findall(f'data-label="{name}" data-value="(.*?)"', settings) == values


def test_a_fork_leaves_the_line_of_its_parent_visible(tmp_path: Path) -> None:
    parent, fork = (running_run(tmp_path / name, spec=spec_of(name)) for name in ("parent", "fork"))
    lines = [json.loads(line) for line in fork.train_metrics.read_text().splitlines()]
    fork.train_metrics.write_text(
        "".join(json_line({**line, "attempt": 0} if line["step"] <= 200 else line) for line in lines)
    )
    start = r"(parent|fork|training): from [^ ]* at (?:step|epoch) ([0-9.]+)"
    compared = report(parent.path, fork.path).html.partition("Accuracy (%)")[0]
    assert re.findall(start, compared)[:2] == [("parent", "0.02"), ("fork", "2.02")]
    assert re.findall(start, report(fork.path).html)[0] == ("training", "2")


def test_page_begins_with_provenance_and_cost(page: Written) -> None:
    html = page.html
    assert facts(html) == {
        "Code": f"{COMMIT[:12]}+dirty", "torch": "2.15.0", "CUDA": "13.2", "Driver": "595.1", "Device": "H200",
        "Jobs": "7", "Nodes": "a1, a2, a3", "Wait in the queue": "1 min 7 s",
        "GPU-hours": "0.243",
    }  # fmt: skip
    assert f"Its code is commit {COMMIT}+dirty." in html


def test_page_begins_with_a_timeline_of_the_attempts(page: Written) -> None:
    timeline = page.html.partition('aria-label="Attempts and interruptions: ')[2].partition('"')[0]
    assert page.html.index(timeline) < page.html.index('class="tiles"')
    names = ["queue", "attempt 1", "recovery", "attempt 1", "recovery", "queue", "recovery", "attempt 2"]
    parts = timeline.split(", ")
    assert [part for part, name in zip(parts, names, strict=True) if not part.startswith(f"{name} ")] == []
    assert ">attempt 2</i>" in page.html, "it has its name in the bar"


@pytest.mark.slow
def test_a_long_log_is_read_in_little_memory(whole: RunDir, tmp_path: Path) -> None:
    run, count = copied(whole, tmp_path), 60_000
    line = {"epoch": 1, "attempt": 1, "time": BEGAN, **{f"layer {number}": 0.123456 for number in range(10)}}
    rows = [{**line, "step": step, "loss": 1 + step % 7} for step in range(count)]
    # The second attempt starts again after step 50,000, which the first one had passed; the extremes stay exact.
    rows += [{**row, "attempt": 2} for row in rows[50_001:]]
    rows[12_345]["loss"], rows[40_001]["loss"], rows[55_000]["loss"] = 99, -9, 1000
    run.train_metrics.write_text("".join(json_line(row) for row in rows))
    (summary,) = summaries([run])
    tracemalloc.start()
    gather(run, summary)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * run.train_metrics.stat().st_size
    written = report(run.path)
    train = pd.read_csv(written.tables[0])
    assert train["step"].tolist() == list(range(count))
    assert train["loss"].dtype == "int64"
    assert (train["attempt"] == 2).sum() == count - 50_001
    assert "training: from 1 at step 0 to 3 at step 59999, lowest -9, highest 99." in written.html


def test_any_number_of_any_file_of_metrics_is_drawn(tmp_path: Path) -> None:
    run = running_run(tmp_path / "r")
    for step in (1, 2, 3, 4, 3, 4, 5):  # it was interrupted after step 4, and began again after step 2
        line = {"step": step, "temperature": 40 + step, "name": "gpu0", "on": True, "nothing": None}
        append_json_line(run.train_metrics.with_name("gpu.jsonl"), {**line, "time": BEGAN + step})
    written = report(run.path)
    assert headings(written.html)[2:8] == [*FIGURES, "temperature"]
    assert "temperature by step. gpu: from 41 at step 1 to 45 at step 5, lowest 41, highest 45." in written.html
    table = pd.read_csv(written.path.with_name("metrics-gpu.csv"))
    assert table["temperature"].tolist() == [41, 42, 43, 44, 45]


def test_steps_in_any_order_stay_unless_a_later_attempt_does_them_again(tmp_path: Path) -> None:
    run = running_run(tmp_path / "r")
    run.eval_metrics.unlink()

    def log(name: str, split: str | None, *steps: int, attempt: int | None = None) -> None:
        for step in steps:
            line = {"step": step, "split": split, "attempt": attempt, "accuracy": step / 1000}
            append_json_line(run.train_metrics.with_name(f"{name}.jsonl"), line)

    def steps(name: str, split: str | None = None) -> list[int]:
        table = pd.read_csv(written.path.with_name(f"{name}.csv"))
        return list((table if split is None else table[table["split"] == split])["step"])

    log("eval", "val", 250, 500, 750, 1000)
    log("eval", "test", 500)  # the best checkpoint
    log("probes", None, 3, 1, 2, 2)
    log("tasks", "a", 10, 20, 30, attempt=1)
    log("tasks", "b", 10, 20, 30, attempt=1)
    log("tasks", "a", 15, 25, attempt=2)  # it went on after step 10, and has not come to task b yet
    log("tasks", "b", 5)  # it does not say which attempt this is
    append_json_line(run.train_metrics.with_name("probes.jsonl"), {"accuracy": 1})
    written = report(run.path)
    assert (steps("eval", "val"), steps("eval", "test")) == ([250, 500, 750, 1000], [500])
    assert "validation: from 25 at step 250 to 100 at step 1000" in written.html
    assert gather(run, summarize(run, None)).best_validation == summarize(run, None).val_accuracy == 1.0
    assert steps("metrics-probes") == [1, 2, 3]
    assert (steps("metrics-tasks", "a"), steps("metrics-tasks", "b")) == ([10, 15, 25], [5, 10, 20, 30])


def test_the_documented_lines_of_a_script_show_in_status_and_report(tmp_path: Path, capsys: Capture) -> None:
    spec = script_spec("my.py", name="own")
    run = pending_run(tmp_path / "own", spec)
    (example,) = re.findall(r"```python\n(.*?)```", Path("docs/reference/metrics.md").read_text(), re.DOTALL)
    environment = {**os.environ, "TORCHRELAY_RUN_DIR": str(run.path)}
    subprocess.run([sys.executable, "-c", example], env=environment, check=True)
    assert status.main([str(run.path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["step"], row["train_loss"], row["images_per_second"]) == (10, 0.7, 5100)
    running = structs.replace(summarize(run, None), state="running", attempt=1)
    assert progress(running) == "attempt 1: step 10, loss 0.7000, 5100 images/s"
    append_json_line(run.eval_metrics, {"step": 10, "loss": 0.6})
    html = report(run.path).html
    assert headings(html)[2:5] == ["Loss", "Images per second", "grad_norm"]
    assert "validation: from 0.6 at step 10" in html, "an evaluation without a split"


def test_running_run_has_curves_and_no_result_yet(tmp_path: Path) -> None:
    html = report(running_run(tmp_path / "r").path).html
    assert "No result: it is written at the end of the run." in html
    assert "Confusion matrix" not in html
    assert {"Loss", "Accuracy (%)", "Interruptions and attempts"} <= set(headings(html))


def test_pending_run_lists_what_is_missing(tmp_path: Path) -> None:
    html = report(pending_run(tmp_path / "r").path).html
    assert "No attempt has started." in html
    assert headings(html) == ["r", "Reproduce it"]
    assert [*facts(html)] == ["Code", "Jobs", "Wait in the queue"]
    assert re.findall(r"<dt>(.*?)</dt>", html)[3:] == ["Interruptions"], "those without a value are not drawn"


def test_failed_run_shows_its_last_message(tmp_path: Path) -> None:
    run = pending_run(tmp_path / "r")
    (run.events / "agent.jsonl").unlink()
    ended = attempt_ended(BEGAN + 3, "bad_input", step=None, detail="error: --lr is 9 & diverged")
    write_events(run, submitted(BEGAN + 1, cluster="local", started=0), claimed(BEGAN + 2), ended)
    html = report(run.path).html
    assert "The run failed. Last message: <code>error: --lr is 9 &amp; diverged</code>" in html
    assert "Nothing interrupted this run." in html
    assert "No result: the run did not finish." in html


def test_custom_script_has_attempts_and_its_command(tmp_path: Path) -> None:
    spec = script_spec("my.py", "a b", "--x", name="own", cluster="local")
    html = report(pending_run(tmp_path / "own", spec).path).html
    assert "For curves, log metrics to $TORCHRELAY_RUN_DIR/metrics/train.jsonl" in html
    assert "No result" not in html
    assert "python -m hpc.submit \\\n  --cluster=local \\\n  -- my.py &#39;a b&#39; --x" in html


def test_shared_pages_have_no_secrets(tmp_path: Path) -> None:
    for name, secret in (("one", "hf_s3cret1"), ("two", "hf_s3cret2")):
        setup = (f"export HF_TOKEN={secret} A=1", f"export B={name}")
        spec = script_spec("my.py", "--api-key", secret, f"--password={secret} x", "--key-dim", "64", name=name)
        pending_run(tmp_path / name, replace(spec, resources=replace(spec.resources, setup=setup)))
    own, both = report(tmp_path / "one").html, report(tmp_path / "one", tmp_path / "two").html
    assert "s3cret" not in own + both
    assert "&#39;--setup=export HF_TOKEN=*** A=1&#39;" in own
    assert "-- my.py --api-key &#39;***&#39; &#39;--password=***&#39; --key-dim 64" in own
    assert "export HF_TOKEN=*** A=1 export B=two" in both


def test_names_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    here = tmp_path / os.fsdecode(b"caf\xe9")
    spec = script_spec("my.py", os.fsdecode(b"--x=\xe9"), name="own", cluster="local")
    runs = [running_run(here / name, spec=replace(spec, name=name)) for name in ("own", "other")]
    assert r"--x=\udce9" in report(runs[0].path).html
    assert report(*(run.path for run in runs)).path == here / "report/index.html"


@pytest.mark.parametrize(
    "file",
    ["spec.json", "metrics/train.jsonl", "metrics/eval.jsonl", "events/agent.jsonl", "final/result.json",
     "final/confusion.csv"],
)  # fmt: skip
@pytest.mark.parametrize(
    "damage", ["cut", pytest.param("empty", marks=pytest.mark.slow), pytest.param("other", marks=pytest.mark.slow)]
)
def test_damaged_file_is_named_and_the_rest_shown(whole: RunDir, tmp_path: Path, file: str, damage: str) -> None:
    run = copied(whole, tmp_path)
    path = run.path / file
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "other": b"[7]"}[damage])
    html = report(run.path).html
    silent = path.suffix == ".jsonl" and damage == "empty"
    whole_json = file == "final/result.json" and damage == "other"
    assert silent or whole_json or f"{path.parent.name}/{path.name}" in html
    assert "train.csv</a>" in html


def test_figures_have_descriptions_for_those_who_cannot_see_them(page: Written) -> None:
    labels = re.findall(r'<div class="plot" [^>]*role="img" aria-label="([^"]*)"', page.html)
    assert len(labels) == len(FIGURES)
    assert any("validation: from 60 at step 100 to 90 at step 400" in words for words in labels)
    assert re.findall(r"<noscript><p>(.*?)</p></noscript>", page.html) == labels, "without JavaScript they are read"


def test_command_submits_the_same_run_again() -> None:
    train = TrainConfig(data="/d a", lr=0.1, ema_decay=0.99, sync_bn=True, image_size=64, checkpoint_every="30s")
    resources = resources_of(
        nodes="2:4", gpus_per_node="a100:8", mem="64G", time="90m", sbatch=("mail-type=END", "comment=a b", "hold")
    )
    recovery = recovery_of(elastic=True, spares=1, signal_before="2m")
    where = {"name": "x", "cluster": "slurm", "data": "/d a", "stage_dir": "/scratch"}
    spec = RunSpec(resources=resources, recovery=recovery, **where, **of_training(train))
    words = shlex.split(submit_command(spec).replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "hpc.submit"]
    parsed = program.parse(submit_flags(), words[3:], "hpc submit")
    assert (parsed.program.train, parsed.resources, parsed.recovery) == (train, resources, recovery)
    assert (parsed.cluster, str(parsed.stage_dir)) == ("slurm", "/scratch")


@pytest.mark.parametrize(
    ("program", "reason"),
    [({"argv": ["-m", "training", "--new-flag=1"]}, "--new-flag"), ({"built_in": "segmenter"}, "runs segmenter")],
)
def test_run_of_a_newer_version_has_all_but_its_settings(
    whole: RunDir, tmp_path: Path, program: dict[str, object], reason: str
) -> None:
    run = copied(whole, tmp_path)
    spec = json.loads(run.spec.read_text())
    run.spec.write_text(json.dumps({**spec, "program": {**spec["program"], **program}}))
    html = report(run.path).html
    (note,) = re.findall(r"<li>([^<]*spec.json[^<]*)</li>", html)
    assert reason in note
    assert {*FIGURES, "Confusion matrix", "Interruptions and attempts"} <= set(headings(html))
    assert "Reproduce it" not in html
    assert "2 runs compared" in report(run.path, whole.path).html
