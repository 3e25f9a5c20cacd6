from pathlib import Path

import pytest

from hpc.errors import UserError
from hpc.rundir import RunDir
from hpc.spec import Resources, RunSpec, check_run_name
from training.config import TrainConfig


def test_spec_survives_the_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    spec = RunSpec(
        name="a b", cluster="slurm", data="/d", stage_dir="/tmp",
        resources=Resources(nodes="2:4", gpus_per_node=4, cpus_per_gpu=2, sbatch=("mail-type=END",)),
        train=TrainConfig(data="/d", lr=0.3),
    )  # fmt: skip
    spec.save(run)
    assert RunSpec.load(run) == spec
    script = RunSpec(
        name="s", cluster="local", data=None, stage_dir="/tmp", resources=Resources(), script=("a.py", "x")
    )
    script.save(run)
    assert RunSpec.load(run) == script


def test_directory_without_spec_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run directory"):
        RunSpec.load(RunDir(tmp_path))


@pytest.mark.parametrize(
    "name", ["a/b", "..", ".", "a..b", "a\nb", "", "-x", ".x", "a%j", "a\\b", " a", "x" * 101, "a\0b"]
)
def test_bad_run_name(name: str) -> None:
    with pytest.raises(UserError, match="--name") as caught:
        check_run_name(name)
    assert "\n" not in str(caught.value)
    suggested = str(caught.value).rpartition("--name ")[2]
    check_run_name(suggested)


@pytest.mark.parametrize("name", ["run", "a b", "it's", '"x"', "$HOME", "a;b", "ünï", "a.b", "x" * 100])
def test_good_run_name(name: str) -> None:
    check_run_name(name)


@pytest.mark.parametrize("nodes", ["0", "x", "4:2", "1:", ":3", "-1", "1:2:3", "1.5", ""])
def test_bad_nodes(nodes: str) -> None:
    with pytest.raises(UserError, match="--nodes"):
        Resources(nodes=nodes)


def test_node_range() -> None:
    resources = Resources(nodes="2:5")
    assert (resources.min_nodes, resources.max_nodes) == (2, 5)


@pytest.mark.parametrize(
    ("option", "hint"),
    [("nodes=3", "use --nodes"), ("output=x", "use --runs-dir"), ("requeue=1", "remove it"), ("x", "KEY=VALUE"),
     ("=y", "KEY=VALUE"), ("comment=a\nb", "KEY=VALUE")],
)  # fmt: skip
def test_bad_sbatch_option(option: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        Resources(sbatch=(option,))
