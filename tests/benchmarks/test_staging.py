"""The benchmark of staging runs, and counts what every way reads."""

from pathlib import Path

from benchmarks.staging import __main__ as staging


def test_ours_reads_the_files_once_and_cp_once_per_node(tmp_path: Path) -> None:
    options = staging.Options(files=50, turns=1, nodes=(2,), rate=50.0, source=tmp_path, disks=tmp_path)
    found = staging.measure(options)
    rows = {(row["storage"], row["method"]): row for row in found.tables["rows"]}
    read = {method: row["bytes_read"] for (storage, method), row in rows.items() if storage == "throttled"}
    assert 50 * 80_000 < read["torchrelay"] < 50 * 140_000
    assert read["cp -r"] == 2 * read["torchrelay"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"
