"""Which flags may change in a training that has begun."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from hpc.base.errors import UserError
from hpc.programs.program_flags import Begun
from hpc.run.rundir import RunDir
from training.config.changes import check_adjusted, refuse_on_fork, refuse_on_resume
from training.config.train_config import LrScheduler, TrainConfig
from training.runtime.train_progress import Progress

CONFIG = TrainConfig(synthetic=True, epochs=4, warmup_epochs=1, lr=0.1, lr_step_epochs="2")
BEGUN = Begun(run=RunDir(Path("r")), typed="r", ended=None, complete=False)
EPOCH = 3


@pytest.mark.parametrize("scheduler", get_args(LrScheduler))
@pytest.mark.parametrize("warmup_epochs", [1.0, 6.0])
def test_epochs_may_change_where_no_learning_rate_so_far_depends_on_them(scheduler: Any, warmup_epochs: float) -> None:
    from training.engine.optim import learning_rate

    before = replace(CONFIG, lr_scheduler=scheduler, warmup_epochs=warmup_epochs)
    after = replace(before, epochs=8)
    rates = [[learning_rate(config, 10, Progress(step=step)) for step in range(40)] for config in (before, after)]
    if rates[0] == rates[1]:
        check_adjusted(before, after, BEGUN, EPOCH)
    else:
        depends = "(lr-scheduler cosine|warmup-epochs 6), the learning rates depend on it"
        with pytest.raises(UserError, match=f"8, but with --{depends}, .* type hpc fork r --name NEW --epochs 8"):
            check_adjusted(before, after, BEGUN, EPOCH)
    check_adjusted(before, after, BEGUN, 0)  # no step has been done


def test_epochs_may_not_change_where_the_sizes_of_the_images_depend_on_them() -> None:
    before = replace(CONFIG, lr_scheduler="constant", initial_image_size=16)
    with pytest.raises(UserError, match="--epochs is 8, but with --initial-image-size, the sizes of the images depend"):
        check_adjusted(before, replace(before, epochs=8), BEGUN, EPOCH)
    check_adjusted(before, replace(before, epochs=8), BEGUN, 0)


@pytest.mark.parametrize(
    ("changes", "ended", "says"),
    [
        ({}, None, "give more --epochs"),
        ({"epochs": 5}, None, None),
        ({"early_stopping_patience": 2}, "early_stopping", "give a larger --early-stopping-patience, or 0"),
        ({"early_stopping_patience": 0}, "early_stopping", None),
        ({"max_hours": 1.0}, "max_hours", "give a larger --max-hours, or 0"),
        ({"max_hours": 9.0}, "max_hours", None),
    ],
)
def test_complete_training_goes_on_only_if_steps_follow(
    changes: dict[str, Any], ended: str | None, says: str | None
) -> None:
    before = replace(CONFIG, lr_scheduler="constant", early_stopping_patience=3, max_hours=2.0)
    begun = replace(BEGUN, ended=ended, complete=True)
    if says is None:
        check_adjusted(before, replace(before, **changes), begun, EPOCH)
    else:
        with pytest.raises(UserError, match=says):
            check_adjusted(before, replace(before, **changes), begun, EPOCH)


def test_flags_of_other_steps_are_sent_to_fork_and_those_of_the_state_to_a_new_run() -> None:
    best = Path("/runs/r/best")
    refuse_on_resume({"epochs", "log-every", "nodes", "time"}, "r", best)
    optimization = ("lr", "weight-decay", "lr-scheduler", "label-smoothing")
    for name in (*optimization, "amp", "mixup", "crop-scale", "repeated-augmentation"):
        with pytest.raises(UserError, match=f"type hpc fork r --name NEW --{name} ..."):
            refuse_on_resume({name}, "r", best)
        refuse_on_fork({name.replace("-", "_")}, best)
    for name in ("model", "batch-size", "seed", "optimizer", "weights", "val-split", "eval-crop-pct"):
        message = f"--{name} cannot change .* --weights /runs/r/best/model.safetensors"
        with pytest.raises(UserError, match=message):
            refuse_on_resume({name}, "r", best)
        with pytest.raises(UserError, match=message):
            refuse_on_fork({name.replace("-", "_")}, best)
