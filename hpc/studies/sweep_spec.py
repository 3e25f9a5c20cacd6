"""The settings of a sweep, its directory, and the values that the parameters of its trials may take."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc.base.errors import UserError
from hpc.studies.group import GroupDir, GroupSpec

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_EXAMPLES = "lr=log:1e-4,1e-1  momentum=float:0.8,0.99  epochs=int:5,20  batch-size=64,128,256"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
Sampler = Literal["tpe", "random", "grid"]
Direction = Literal["maximize", "minimize"]
Pruner = Literal["median", "none"]


@dataclass(frozen=True, kw_only=True)
class SweepSpec(GroupSpec):
    """The settings of a sweep."""

    param: tuple[str, ...]
    trials: int
    metric: str
    """Name of the metric, as trackers show it, such as `val/accuracy`."""
    direction: Direction
    sampler: Sampler
    pruner: Pruner
    seed: int

    def check(self) -> None:
        """Raise UserError if a number is not allowed."""
        super().check()
        if self.trials < 1:
            raise UserError(f"--trials is {self.trials}: use 1 or more")


class SweepDir(GroupDir[SweepSpec]):
    """The files of a sweep, by name. Its runs have the numbers of Optuna's trials, such as 003."""

    KIND = TITLE = "sweep"
    FIRST_FLAG = "--param NAME=VALUES"
    SPEC = SweepSpec

    @property
    def journal(self) -> Path:
        """The file of Optuna's journal, which has all trials."""
        return self.path / "journal.log"

    @property
    def best(self) -> Path:
        """The file with the flags of the best trial, for --config."""
        return self.path / "best.yaml"


def read_space(params: Sequence[str]) -> "dict[str, BaseDistribution]":
    """Return the distribution of each parameter's values, by the parameter's name.

    Raises UserError if a parameter is malformed.
    """
    space: dict[str, BaseDistribution] = {}
    for param in params:
        name, _, values = param.partition("=")
        if not _NAME.fullmatch(name) or not values:
            raise UserError(f"--param {param!r}: use NAME=VALUES, such as {_EXAMPLES}")
        if name in space:
            raise UserError(f"--param {name} is given twice: write all of its values into one --param")
        space[name] = _distribution(param, values)
    return space


def _distribution(param: str, values: str) -> "BaseDistribution":
    from optuna.distributions import (  # noqa: PLC0415 - takes a second
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    kind, separator, limits = values.partition(":")
    if not separator:
        choices = values.split(",")
        if len({*choices}) < len(choices) or not all(choices):
            raise UserError(f"--param {param}: a value is empty, or given twice")
        return CategoricalDistribution(choices)
    low, _, high = limits.partition(",")
    try:
        if kind == "int":
            return IntDistribution(int(low), int(high))
        if kind in {"float", "log"}:
            return FloatDistribution(float(low), float(high), log=kind == "log")
    except ValueError as error:
        raise UserError(f"--param {param}: {error}: use KIND:LOW,HIGH, such as {_EXAMPLES}") from error
    raise UserError(f"--param {param}: there is no kind {kind!r}: use log, float or int, or a list of values")


def grid_of(space: "Mapping[str, BaseDistribution]") -> list[dict[str, str]]:
    """Return all combinations of values; the last parameter varies fastest. Raises UserError for a range."""
    lists: list[list[str]] = []
    for name, values in space.items():
        choices = getattr(values, "choices", None)
        if choices is None:
            raise UserError(f"--param {name} is a range, and a grid needs a list: {name}=1e-4,1e-3,1e-2")
        lists.append(list(choices))
    return [dict(zip(space, values, strict=True)) for values in product(*lists)]


def shown(value: object) -> str:
    """Format a trial's value for a flag; a float gets six significant digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def settings_text(params: Mapping[str, Any]) -> str:
    """Format a trial's values as text, such as `lr=0.1 epochs=5`."""
    return " ".join(f"{name}={shown(value)}" for name, value in params.items())
