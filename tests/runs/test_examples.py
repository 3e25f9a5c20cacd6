"""Each example on a real Slurm, interrupted once, with the real libraries; it ends with every step done once.

Those of other libraries are collected where TORCHRELAY_EXAMPLES names the Python of their environment
(examples/README.md).
"""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import ROOT, TWO_NODES, Run, Site
from support.trainings import make_folder

from hpc.base.files import read_json_lines

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

PYTHON = os.environ.get("TORCHRELAY_EXAMPLES")


def copy_idx(data: Path) -> None:
    shutil.copytree(data.with_name("data"), data)


def write_text(data: Path) -> None:
    data.mkdir()
    (data / "train.txt").write_text((ROOT / "LICENSE").read_text())


def write_folder(data: Path) -> None:
    make_folder(data, ("train",), per_class=40)


def write_dataset(data: Path) -> None:
    """Saved by the library itself."""
    write_text(data.with_name("text"))
    code = (
        "import datasets, sys; datasets.Dataset.from_text(sys.argv[1], cache_dir=sys.argv[2]).save_to_disk(sys.argv[3])"
    )
    words = (str(data.with_name("text") / "train.txt"), str(data.with_name("cache")), str(data))
    subprocess.run([PYTHON or "", "-c", code, *words], check=True)


def write_shards(data: Path) -> None:
    """Two shards, of all classes each."""
    folder = make_folder(data.with_name("folder"), ("train",), per_class=40)
    data.mkdir()
    names, images = sorted(path.name for path in (folder / "train").iterdir()), sorted(folder.glob("train/*/*"))
    for shard in range(2):
        with tarfile.open(data / f"{shard}.tar", "w") as tar:
            for image in images[shard::2]:
                label = image.with_suffix(".cls")
                label.write_text(str(names.index(image.parent.name)))
                for file in (image, label):
                    tar.add(file, f"{image.parent.name[:3]}{image.stem}{file.suffix}")


# By directory: what writes its data, its arguments, and the steps of a whole training.
OWN: dict[str, tuple[Callable[[Path], None] | None, tuple[str, ...], int]] = {
    "ddp": (copy_idx, ("--data", "{data}", "--epochs=32", "--batch-size=16"), 2016),
    "fsdp2": (write_text, ("--data={data}", "--steps=400"), 400),
}
OF_LIBRARIES: dict[str, tuple[Callable[[Path], None] | None, tuple[str, ...], int]] = {
    "hydra_gpt": (None, ("steps=400", "hydra.run.dir={run_dir}/hydra", "model.width=32"), 400),
    "lightning": (None, ("--nodes=2", "--epochs=20"), 1000),
    "accelerate": (None, ("--epochs=20",), 1000),
    "huggingface": (write_dataset, ("{data}", "{run_dir}", "--epochs=40"), 480),
    "timm": (write_folder, ("{data}", "--model=test_resnet", "--epochs=10", "--workers=0"), 80),
    "webdataset": (write_shards, ("{data}", "--classes=3", "--steps-per-epoch=20", "--epochs=20"), 400),
}
EXAMPLES = {**OWN, **(OF_LIBRARIES if PYTHON else {})}


def submit(site: Site, name: str) -> Run:
    shutil.copytree(ROOT / "examples" / name, site.path / "examples" / name)
    for command in (("git", "init", "-q"), ("git", "add", "examples")):
        assert site.type(*command).returncode == 0
    write, arguments, _ = EXAMPLES[name]
    if write:
        write(site.path / "of-example")
    data = ("--data=of-example",) if write else ()
    python = (f"--python={PYTHON}",) if name in OF_LIBRARIES else ()
    return site.submit(*TWO_NODES, *data, *python, f"--name={name}", "--", f"examples/{name}/train.py", *arguments)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_interrupted_and_ends_right(site: Site, name: str) -> None:
    _, _, steps = EXAMPLES[name]
    run = submit(site, name)
    run.wait_for_steps(20)
    site.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.wait_for_next_job()
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", "completed"]
    assert [len(run.events(kind)) for kind in ("requeued", "resubmitted")] == [0, 1], "no library has requeued it"
    assert not run.events("interruption")
    assert run.steps() == list(range(1, steps + 1)), "each step once"
    lines = list(read_json_lines(run.directory.train_metrics))
    first, last = ([line["loss"] for line in part] for part in (lines[:10], lines[-10:]))
    print(site.hpc("status", name).stdout)  # with -s: what examples/README.md shows
    assert sum(last) < sum(first), "it has learned something"
