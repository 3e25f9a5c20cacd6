"""Each example on a real Slurm, interrupted once, with the real libraries; it ends with every step done once.

Those of other libraries are collected where TORCHRELAY_EXAMPLES names the Python of their environment
(examples/README.md).
"""

import os
import shutil

import pytest
from support.cluster import ROOT, TWO_NODES, Run, Site

from hpc.core.files import read_json_lines

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

PYTHON = os.environ.get("TORCHRELAY_EXAMPLES")
# By directory: its arguments, and the steps of a whole training.
OWN = {
    "ddp": (("--data", "{data}", "--epochs=32", "--batch-size=16"), 2016),
    "fsdp2": (("--steps=400",), 400),
}
OF_LIBRARIES = {
    "hydra_gpt": (("steps=400", "hydra.run.dir={run_dir}/hydra", "model.width=32"), 400),
    "lightning": (("{run_dir}", "--nodes=2", "--epochs=20"), 1000),
    "accelerate": (("--epochs=20",), 1000),
    "huggingface": (("{run_dir}", "--epochs=8"), 400),
    "timm": (("--epochs=10",), 200),
}
EXAMPLES = {**OWN, **(OF_LIBRARIES if PYTHON else {})}


def submit(site: Site, name: str) -> Run:
    for file in ("training/__init__.py", "training/relay.py"):
        (site.path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, site.path / file)
    shutil.copytree(ROOT / "examples" / name, site.path / "examples" / name)
    for command in (("git", "init", "-q"), ("git", "add", "examples", "training")):
        assert site.type(*command).returncode == 0
    arguments, _ = EXAMPLES[name]
    data = ("--data=data",) if "{data}" in arguments else ()
    python = (f"--python={PYTHON}",) if name in OF_LIBRARIES else ()
    return site.submit(*TWO_NODES, *data, *python, f"--name={name}", "--", f"examples/{name}/train.py", *arguments)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_interrupted_and_ends_right(site: Site, name: str) -> None:
    _, steps = EXAMPLES[name]
    run = submit(site, name)
    run.wait_for_steps(20)
    site.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.wait_for_release()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", "completed"]
    assert len(run.events("requeued")) == 1, "no library has requeued it, too"
    assert not run.events("interruption")
    assert run.steps() == list(range(1, steps + 1)), "each step once"
    lines = list(read_json_lines(run.directory.train_metrics))
    first, last = ([line["loss"] for line in part] for part in (lines[:10], lines[-10:]))
    print(site.hpc("status", name).stdout)  # with -s: what examples/README.md shows
    assert sum(last) < sum(first), "it has learned something"
