"""What the text of a script tells before it runs, and when it tells nothing."""

import os
from pathlib import Path

import pytest
from support.events import resources_of, script_spec

from hpc.submissions.user_code.own_code import find_code
from hpc.submissions.user_code.script_hints import hints

TRAINS = "loss.backward()\n"
SPAWNS = "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)\n"
HYDRA = "import hydra\n@hydra.main({})\ndef main(config): pass\n"


def told(directory: Path, text: str, *arguments: str, nodes: str = "2", **files: str) -> str:
    for name, content in {"train.py": text, **files}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    code = find_code(directory, ("train.py", *arguments))
    return "\n".join(hints(code, script_spec("train.py", resources=resources_of(nodes=nodes, gpus_per_node="0"))))


@pytest.mark.parametrize(
    "text",
    [
        "import torch, numpy as np, os.path\n" + TRAINS,
        "from torch import nn\nfrom model import Net\nimport tqdm, wandb\n" + TRAINS,
    ],
)
def test_equal_trainings_are_told(text: str, tmp_path: Path) -> None:
    said = told(tmp_path, text, **{"model.py": "import torch.nn\n"})
    assert said.startswith("train.py does not join its 2 ranks (it never calls init_process_group), so each")
    assert "use --nodes 1, or" in said
    assert told(tmp_path, text, nodes="1") == ""


@pytest.mark.parametrize(
    "text",
    [
        "import torch, torch.distributed as dist\ndist.init_process_group()\n",
        "import torch, lightning\n",
        "import torch\nfrom accelerate import Accelerator\n",
        "import torch\nfrom helpers import start\n",
        "import torch, importlib\nimportlib.import_module('engine').run()\n",
        "import torch, os\nshard = int(os.environ['RANK'])\n",
    ],
)
def test_nothing_is_told_of_ranks_that_may_be_joined(text: str, tmp_path: Path) -> None:
    assert told(tmp_path, text + TRAINS, **{"helpers.py": "from torch import distributed\n"}) == ""


def test_a_script_that_does_not_train_needs_no_process_group(tmp_path: Path) -> None:
    assert told(tmp_path, "import torch\nprint(torch.__version__)\n") == ""


def test_processes_of_its_own_are_told(tmp_path: Path) -> None:
    assert "starts processes with mp.spawn, but is itself started 2 times" in told(tmp_path, SPAWNS + TRAINS)
    assert told(tmp_path, SPAWNS, nodes="1") == ""
    both = "import os\nif 'LOCAL_RANK' not in os.environ:\n    mp.spawn(main)\n"
    assert told(tmp_path, SPAWNS + both) == "", "it may run under torchrun, too"


FIXED = "hydra:\n  run:\n    dir: outputs/fixed\n"


@pytest.mark.parametrize(
    ("decorator", "arguments", "config", "is_told"),
    [
        ('config_path="conf"', (), "", True),
        ("version_base=None", (), "", False),
        ("version_base=None", ("hydra.job.chdir=True",), "", True),
        ('version_base="1.3", config_path="conf"', (), "dir: ${hydra:runtime.output_dir}\n", True),
        ('config_path="conf"', (), FIXED, False),
        ('config_path="conf"', (), FIXED.replace("fixed", "${now:%H}"), True),
        ('config_path="conf"', (), "hydra:\n  job:\n    chdir: false\n", False),
        ('config_path="conf"', ("hydra.run.dir={run_dir}/hydra",), "", False),
        ('config_path="conf"', (), "not: [yaml", True),
    ],
)
def test_a_new_directory_at_each_start_is_told(
    decorator: str, arguments: tuple[str, ...], config: str, is_told: bool, tmp_path: Path
) -> None:
    said = told(tmp_path, HYDRA.format(decorator), *arguments, **{"conf/config.yaml": config})
    assert said == "" or is_told
    assert ("add 'hydra.run.dir={run_dir}/hydra' to its arguments" in said) == is_told


def test_a_group_of_hydra_may_fix_the_directory(tmp_path: Path) -> None:
    files = {"conf/config.yaml": "", "conf/hydra/default.yaml": "run:\n  dir: fixed\n"}
    assert told(tmp_path, HYDRA.format('config_path="conf"'), **files) == ""


def test_no_file_beside_a_configuration_fails_or_delays_a_hint(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    (conf / "loop").mkdir(parents=True)
    (conf / "local.yaml").symlink_to("absent")
    (conf / "self.yaml").symlink_to("self.yaml")
    (conf / "loop/up").symlink_to("..")
    (conf / "closed.yaml").write_text("a: 1\n")
    (conf / "closed.yaml").chmod(0)
    (conf / "closed").mkdir(mode=0)
    (conf / "directory.yaml").mkdir()
    os.mkfifo(conf / "pipe.yaml")
    assert told(tmp_path, HYDRA.format('config_path="conf"'), **{"conf/z.yaml": ""})
    assert told(tmp_path, HYDRA.format('config_path="conf"'), **{"conf/z.yaml": FIXED}) == ""
    assert told(tmp_path, HYDRA.format('config_path="none"'))


def test_data_beside_a_configuration_is_not_walked(tmp_path: Path) -> None:
    """The configuration is found, though it comes after the data, and a directory of many files is read in part."""
    for number in range(12):
        (tmp_path / "data" / str(number)).mkdir(parents=True)
    for number in range(11_000):
        (tmp_path / "data" / str(number // 1000) / f"{number}.yaml").touch()
    (tmp_path / "data/11/last.yaml").write_text(FIXED)
    assert told(tmp_path, HYDRA.format('config_path="."'))
    assert told(tmp_path, HYDRA.format('config_path="."'), **{"z/hydra.yaml": FIXED}) == ""


def test_an_expression_of_any_length_fails_no_hint(tmp_path: Path) -> None:
    assert told(tmp_path, f"import torch\nx{'.add()' * 800}\n" + TRAINS) == ""
