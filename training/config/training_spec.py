"""Owns the part of a run's spec that its trainer reads, and the program that node agents run for a training.

Runs on the login node and on every rank. Does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc.run.causes import EXIT_CODES
from hpc.run.spec_file import LIBRARIES, Program, read_spec
from training.config.dataset_layout import find_data
from training.config.evaluation_task import EvaluationTask
from training.config.model_names import OWN_MODELS, TIMM
from training.config.train_config import RankOptions, TrainConfig

_WITHOUT_COMPILER = "training.runtime.without_compiler:leave_out_compiler"
_TRAINER = ("training.engine.launch", "torch.utils.tensorboard", "training.data.in_memory:keep_data")
TORCHVISION = ("torchvision.models", "torchvision.transforms.v2")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training or evaluation of a run."""

    train: TrainConfig
    recipe: str | None = None
    forked_from: str | None = None
    """Checkpoint of another run with which the training began; None if the training is not a fork."""
    evaluation: EvaluationTask | None = None
    """Task of `hpc evaluate`; None for a training."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Training":
        """Return the training with these fields. Raises LookupError, TypeError or ValueError if a field is wrong."""
        task = fields.get("evaluation")
        return cls(
            **{**fields, "train": TrainConfig(**fields["train"])} | {"evaluation": task and EvaluationTask(**task)}
        )


def trainer_program(train: TrainConfig, *, has_data: bool) -> Program:
    """Return the program of a training or an evaluation. Without data (`has_data`), images are generated."""
    arguments = spec_argv(
        "{torchrelay_spec}", "{run_dir}", "{attempt}", "{torchrelay_node_dir}", data="{data}" if has_data else None
    )
    return Program(
        argv=("-m", "training", *arguments),
        preload=_preload(train),
        exit_codes=EXIT_CODES,
        reports_steps=True,
        writes_result=True,
    )


def _preload(train: TrainConfig) -> tuple[str, ...]:
    """Return the modules that all ranks need. The process that forks the ranks imports them once per node."""
    library: tuple[str, ...] = TORCHVISION
    if train.model.startswith(TIMM):
        library = ("timm", *TORCHVISION)
    elif train.model in OWN_MODELS and train.auto_augment == "none" and not train.color_jitter:
        library = ()
    return (*(LIBRARIES if needs_compiler(train) else (_WITHOUT_COMPILER,)), *_TRAINER, *library)


def needs_compiler(train: TrainConfig) -> bool:
    """Return whether the trainer uses torch's compiler, or a part of torch that cannot do without it."""
    return train.compile or train.strategy == "fsdp" or train.checkpoint_activations


def spec_argv(
    spec: Path | str,
    run_dir: Path | str,
    attempt: int | str,
    node_dir: Path | str,
    *,
    data: Path | str | None = None,
    fault: str = "",
) -> list[str]:
    """Return the arguments of `python -m training` for a rank that reads its flags from a spec.

    `data` is the directory of the data on the node, if the run has data.
    """
    optional = {"data": data or "", "fault": fault}
    argv = [f"--spec={spec}", f"--run-dir={run_dir}", f"--attempt={attempt}", f"--node-dir={node_dir}"]
    return argv + [f"--{name}={value}" for name, value in optional.items() if value]


def is_from_spec(argv: Sequence[str]) -> bool:
    """Return whether these arguments come from `spec_argv`."""
    return bool(argv) and argv[0].startswith("--spec=")


def rank_options(argv: Sequence[str]) -> tuple[RankOptions, EvaluationTask | None]:
    """Return the options of a rank whose arguments come from `spec_argv`, and its evaluation or None.

    Raises:
        OSError: the storage does not answer, but another start may succeed.
        UserError: the spec is not JSON, or has flags of another version.
    """
    given = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
    training = read_spec(Path(given["spec"]), lambda fields: Training.from_json(fields["training"]))
    train = training.train
    options = RankOptions(
        train=replace(train, data=str(find_data(Path(given["data"])))) if "data" in given else train,
        recipe=training.recipe,
        run_dir=Path(given["run-dir"]),
        attempt=int(given["attempt"]),
        node_dir=Path(given["node-dir"]),
        fault=given.get("fault", ""),
    )
    return options, training.evaluation
