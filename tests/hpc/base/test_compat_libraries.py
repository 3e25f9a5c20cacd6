"""The private names of submitit and Optuna that hpc needs still exist: a test fails with what would break."""

import optuna
import pytest
import submitit
from submitit.core.core import Executor

from hpc.base import compat


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (submitit.SlurmExecutor, "_submitit_command_str", "each task would run a pickle"),
        (submitit.SlurmExecutor, "_make_submission_file_text", "no run could have a script"),
        (submitit.LocalExecutor, "_submitit_command_str", "each task of a local run would run a pickle"),
        (submitit.LocalExecutor, "_submit_command", "no local run could start"),
    ],
)
def test_submitit_still_has_the_member(owner: type[Executor], name: str, use: str) -> None:
    assert hasattr(owner, name), (
        f"submitit {submitit.__version__} lacks {owner.__name__}.{name}: {use} (hpc/base/compat.py)"
    )


def test_optuna_still_leads_back_to_a_trial() -> None:
    study = optuna.create_study()
    number = study.ask().number
    [stored] = study.get_trials()
    assert hasattr(stored, "_trial_id"), (
        f"Optuna {optuna.__version__} has no FrozenTrial._trial_id: hpc sweep could not report to a trial that another "
        "process has started (hpc/base/compat.py)"
    )
    compat.running_trial(study, stored).set_user_attr("cause", "x")
    assert study.trials[number].user_attrs == {"cause": "x"}
