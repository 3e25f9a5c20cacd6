"""A node's report in `hpc doctor --node` and `hpc smoke`."""

from pathlib import Path

import pytest

from jobs.node_probe import summarize, write_rate


def test_speed_of_a_disk_leaves_nothing_on_it(tmp_path: Path) -> None:
    rate = write_rate(tmp_path)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "exit_code", "line", "problem"),
    [
        ("preflight: 2 ranks on GPU, 0.1 s\n", 0, "preflight: 2 ranks on GPU, 0.1 s", ""),
        ("", 0, "", ""),
        (
            "error: this rank passed the check, but x\nerror: rank 1 computes wrongly\nnoise\n",
            1,
            "",
            "rank 1 computes wrongly",
        ),
        ("Traceback\nRuntimeError: no route\n\n", 1, "", "RuntimeError: no route"),
        ("", 1, "", "no output"),
        ("waiting\n", 124, "", "no answer in 180 s: the nodes do not reach each other, or something hangs"),
    ],
)
def test_summary_of_what_ranks_printed(output: str, exit_code: int, line: str, problem: str) -> None:
    assert summarize(output, exit_code, "preflight: ") == (line, problem)
