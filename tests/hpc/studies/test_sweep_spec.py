"""What `--param` takes."""

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hpc.base.errors import UserError
from hpc.programs.script_flags import ScriptFlags
from hpc.studies.sweep_spec import grid_of, read_space, shown


def test_ranges_and_lists() -> None:
    params = ("lr=log:1e-4,1e-1", "momentum=float:0.8,0.99", "epochs=int:5,20", "batch_size=64,128")
    assert read_space(params) == {
        "lr": FloatDistribution(1e-4, 1e-1, log=True), "momentum": FloatDistribution(0.8, 0.99),
        "epochs": IntDistribution(5, 20), "batch_size": CategoricalDistribution(["64", "128"]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (("lr",), r"--param 'lr': use NAME=VALUES, such as lr=log:1e-4,1e-1"),
        (("lr=",), r"use NAME=VALUES"),
        (("lr=log:1",), r"--param lr=log:1: could not convert .* use KIND:LOW,HIGH"),
        (("lr=log:0,1",), r"--param lr=log:0,1: "),
        (("n=int:1.5,2",), r"--param n=int:1.5,2: invalid literal"),
        (("lr=exp:1,2",), r"there is no kind 'exp': use log, float or int"),
        (("n=1,1",), r"a value is empty, or given twice"),
        (("n=1,2", "n=3"), r"--param n is given twice"),
    ],
)
def test_wrong_parameters_say_what_to_type(params: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_space(params)


def test_grid_takes_lists_alone() -> None:
    assert grid_of(read_space(("n=1,2", "m=a,b"))) == [
        {"n": "1", "m": "a"}, {"n": "1", "m": "b"}, {"n": "2", "m": "a"}, {"n": "2", "m": "b"},
    ]  # fmt: skip
    with pytest.raises(UserError, match="--param lr is a range, and a grid needs a list"):
        grid_of(read_space(("lr=log:1,2",)))


def test_values_stand_in_the_words_of_a_script_or_after_them_and_other_braces_stay() -> None:
    script = ScriptFlags(script=("a.py", "--x={lr}/{other}/{}"))
    values = {"lr": shown(0.00123456789), "batch_size": "8"}
    assert script.with_values(values).script == ("a.py", "--x=0.00123457/{other}/{}", "--batch_size=8")
