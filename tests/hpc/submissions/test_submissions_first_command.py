"""What is printed for `hpc submit --nodes 2 --gpus-per-node 4`, the first command of a new user."""

import re
from pathlib import Path

from support.fake_slurm import queueing_site

from training.config.dataset_layout import FASHION_MNIST_DIRECTORY


def test_first_line_names_the_data_that_it_chooses(shared: Path) -> None:
    site, environment = queueing_site(shared)
    submit = ("submit", "--nodes=2", "--gpus-per-node=4")
    digits = "scikit-learn's handwritten digits (1,797 images)"
    usual = "Fashion-MNIST (60,000 images)" if FASHION_MNIST_DIRECTORY.is_dir() else digits
    for words, title in (((), usual), (("--recipe=digits",), digits)):
        done = site.hpc(*submit, *words, **environment)
        assert done.returncode == 0, done.stderr
        first, second, *_ = done.stdout.splitlines()
        assert first == f"training small-cnn on {title}; use --data PATH for your own images"
        assert re.fullmatch(r"submitted run small-cnn-[\d-]+ as job \d", second)
    assert site.hpc(*submit, "--synthetic", **environment).stdout.startswith("submitted run ")
