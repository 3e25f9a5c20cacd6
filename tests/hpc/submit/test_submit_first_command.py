"""What is printed for `hpc submit --nodes 2 --gpus-per-node 4`, the first command of a new user."""

import re
from pathlib import Path

import pytest
from support.fake_slurm import queueing_site

from training.config.dataset_layout import FASHION_MNIST_DIRECTORY


@pytest.mark.parametrize("words", [(), ("--recipe=digits",)], ids=["no flag names data", "digits"])
def test_first_line_names_the_data(words: tuple[str, ...], shared: Path) -> None:
    site, environment = queueing_site(shared)
    done = site.hpc("submit", "--nodes=2", "--gpus-per-node=4", *words, **environment)
    assert done.returncode == 0, done.stderr
    title = "Fashion-MNIST (60,000 images)" if not words and FASHION_MNIST_DIRECTORY.is_dir() else (
        "scikit-learn's handwritten digits (1,797 images)"
    )  # fmt: skip
    first, second, *_ = done.stdout.splitlines()
    assert first == f"training small-cnn on {title}; use --data PATH for your own images"
    assert re.fullmatch(r"submitted run small-cnn-[\d-]+ as job 1", second)


def test_other_trainings_print_no_such_line(shared: Path) -> None:
    site, environment = queueing_site(shared)
    done = site.hpc("submit", "--nodes=2", "--gpus-per-node=4", "--synthetic", **environment)
    assert done.stdout.startswith("submitted run ")
