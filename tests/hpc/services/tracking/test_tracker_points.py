"""What is sent of `metrics/*.jsonl`, whoever wrote them."""

from pathlib import Path

from hpc.base.files import append_json_line
from hpc.services.tracking.tracker import read_points


def test_steps_that_were_sent_are_left_out_and_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    for step, loss in ((10, 3.0), (20, 2.0), (30, 9.0), (20, 2.5), (30, 1.0)):  # it restarted after step 10
        append_json_line(tmp_path / "train.jsonl", {"step": step, "loss": loss})
    append_json_line(tmp_path / "eval.jsonl", {"step": 10, "split": "val", "loss": 5.0})
    points = read_points(tmp_path, {"train": 10})
    assert [(point.step, dict(point.values)) for point in points] == [
        (10, {"val/loss": 5.0}), (20, {"train/loss": 2.5}), (30, {"train/loss": 1.0}),
    ]  # fmt: skip


def test_what_is_not_there_or_of_another_shape_has_no_points(tmp_path: Path) -> None:
    assert read_points(tmp_path / "missing", {}) == []
    (tmp_path / "train.jsonl").write_text('{"step": "x"}\n[1]\n{"loss": 1}\n{"step": 1, "loss": null, "ok": tr')
    append_json_line(tmp_path / "train.jsonl", {"step": 2, "loss": float("nan"), "note": "text", "flag": True})
    (point,) = read_points(tmp_path, {})
    assert (point.step, list(point.values), point.time) == (2, ["train/loss"], None)
