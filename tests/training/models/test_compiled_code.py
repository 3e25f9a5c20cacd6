"""The code that torch.compile makes is made once for each run and kind of processor."""

from pathlib import Path

import pytest
from support.trainings import Starter, final, needs_compiler, same

FLAGS = ("--compile", "--model=small-cnn", "--epochs=2", "--batch-size=64", "--log-every=1")


def libraries(directory: Path) -> list[Path]:
    """The libraries that a compiler has made below a directory."""
    return sorted(path.relative_to(directory) for path in directory.rglob("*.so"))


@pytest.mark.slow
@needs_compiler
def test_a_start_on_another_node_compiles_nothing(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cut = start(*FLAGS, f"--node-dir={tmp_path / 'node1'}", world_size=2)
    cut.wait_for_step(2)
    cut.kill()
    [kept] = (cut.run_dir / "compiled").iterdir()
    made = libraries(kept)
    assert made
    resumed = start.complete(*FLAGS, f"--node-dir={tmp_path / 'node2'}", world_size=2)
    assert libraries(tmp_path / "node2" / "compiled") == made
    calm = start.complete(*FLAGS, f"--node-dir={tmp_path / 'node3'}", world_size=2, run="calm")
    assert same(final(resumed.run_dir), final(calm.run_dir))
