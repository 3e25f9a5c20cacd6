"""The directory of a scaling study, which has a run for each size."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from hpc.base.errors import UserError
from hpc.studies.group_dir import GroupDir, GroupSpec

Mode = Literal["weak", "strong"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The resources of one run of the study."""

    nodes: int
    gpus: int
    """GPUs per node; 0 means one rank per node on its CPUs."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * max(1, self.gpus)

    @property
    def name(self) -> str:
        """The name of the run, such as `2x4` for 2 nodes with 4 GPUs each."""
        return f"{self.nodes}x{self.gpus}"


@dataclass(frozen=True, kw_only=True)
class ScalingSpec(GroupSpec):
    """The settings of a study."""

    nodes: tuple[int, ...]
    gpus: tuple[int, ...]
    gpu_type: str | None
    minutes: float
    """Minutes of training of each run."""
    mode: Mode
    """`weak` means that the global batch grows with the ranks, `strong` that all sizes have the same global batch."""

    @property
    def sizes(self) -> Sequence[Size]:
        """All combinations of nodes and GPUs per node, sorted by the number of ranks, then of nodes."""
        sizes = [Size(nodes=nodes, gpus=gpus) for nodes, gpus in product(self.nodes, self.gpus)]
        return sorted(sizes, key=lambda size: (size.ranks, size.nodes))

    def growth(self, size: Size) -> float:
        """Return the batch of all ranks together, as a multiple of the smallest size's."""
        return size.ranks / self.sizes[0].ranks if self.mode == "weak" else 1.0


class ScalingDir(GroupDir[ScalingSpec]):
    """The files of a study, by name."""

    KIND, TITLE = "scaling", "scaling study"
    SPEC = ScalingSpec


def split_sizes(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the values of `--nodes`, the values of `--gpus-per-node`, and the other arguments.

    `--nodes 1 2 4`, `--nodes=1,2,4` and `-N 1 2 4` are the same.
    """
    values: dict[str, list[str]] = {"--nodes": [], "--gpus-per-node": []}
    others, current = list[str](), None
    for word in arguments:
        name, separator, value = word.partition("=")
        name = {"-N": "--nodes"}.get(name, name.replace("_", "-"))
        if name in values:
            current = values[name]
            current += value.split(",") if separator else []
        elif current is not None and word[:1].isalnum():
            current += word.split(",")
        else:
            current = None
            others.append(word)
    return values["--nodes"], values["--gpus-per-node"], others


def read_nodes(values: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of nodes. Raises UserError if a value is not a positive whole number, or is repeated."""
    if not all(value.isdecimal() and int(value) for value in values) or len({*values}) < len(values):
        raise UserError(f"--nodes is {' '.join(values)!r}: use different numbers, such as --nodes 1 2 4 8")
    return tuple(map(int, values))


def read_gpus(values: Sequence[str]) -> tuple[str | None, tuple[int, ...]]:
    """Return the GPU type, or None, and the numbers of GPUs per node. Raises UserError if a value is not allowed."""
    split = [value.rpartition(":")[::2] for value in values]
    types = {kind for kind, _ in split if kind}
    numbers = [number for _, number in split]
    if len(types) > 1 or not all(map(str.isdecimal, numbers)) or len({*numbers}) < len(numbers):
        raise UserError(
            f"--gpus-per-node is {' '.join(values)!r}: use different numbers, such as 1 4, or a100:1 a100:4"
        )
    return next(iter(types), None), tuple(map(int, numbers))
