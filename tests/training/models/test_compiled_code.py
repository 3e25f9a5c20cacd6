"""The code that torch.compile makes is made once for each run and kind of processor."""

from pathlib import Path

import pytest
from support.trainings import Starter, needs_compiler

FLAGS = ("--compile", "--model=small-cnn", "--epochs=2", "--batch-size=64", "--log-every=1")


def libraries(directory: Path) -> dict[str, int]:
    """When each library below a directory was made. A copy has the time of its original."""
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in sorted(directory.rglob("*.so"))}


@pytest.mark.slow
@needs_compiler
def test_a_start_on_another_node_compiles_nothing(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    first, second = tmp_path / "node1", tmp_path / "node2"
    first.mkdir()
    second.mkdir()
    cut = start(*FLAGS, f"--node-dir={first}")
    cut.wait_for_step(2)
    cut.kill()
    [kept] = (cut.run_dir / "compiled").iterdir()
    assert libraries(kept) == libraries(first / "compiled") != {}
    start.complete(*FLAGS, f"--node-dir={second}")
    assert libraries(second / "compiled") == libraries(kept)
