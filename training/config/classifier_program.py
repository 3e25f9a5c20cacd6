"""The image classifier as a program of the launcher. Its flags are the fields of `TrainConfig` (train_config.py).

Runs on the login node; does not import torch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from hpc.base import program as command_line
from hpc.base.errors import UserError, need_classifier
from hpc.base.files import last_json_line
from hpc.base.flag_files import flag_names
from hpc.programs.program_flags import Begun, ProgramFlags, ResolvedProgram
from hpc.run.causes import EXIT_CODES
from hpc.run.rundir import RunDir
from hpc.run.spec import RunSpec
from hpc.run.spec_file import BRACE, LIBRARIES, Program
from training.config import data_checks
from training.config.changes import IDENTIFYING, OF_THE_BEGINNING, check_adjusted, refuse_on_fork, refuse_on_resume
from training.config.command_line import RecipeName, preset, train_words
from training.config.dataset_layout import resolve_data, title_of
from training.config.evaluation_task import EvaluationTask
from training.config.model_names import OWN_MODELS, TIMM, check_model, resolve_weights
from training.config.rules import check_device, without_effect
from training.config.train_config import (
    Adjustable,
    RankOptions,
    TrainConfig,
    check_world,
    highest_learning_rate,
    needs_compiler,
)

_WITHOUT_COMPILER = "training.runtime.without_compiler:leave_out_compiler"
_TRAINER = ("training.engine.launch", "torch.utils.tensorboard", "training.data.in_memory:keep_data")
TORCHVISION = ("torchvision.models", "torchvision.transforms.v2")
# The first arguments of ranks that a node agent starts. Their other flags are those of `train`.
_RANK_WORDS = ("--run-dir={run_dir}", "--attempt={attempt}", "--node-dir={torchrelay_node_dir}", "--resolved")
_DATA_WORD = "--data={data}"


@dataclass(frozen=True, kw_only=True)
class ClassifierRequest(TrainConfig):
    """The flags of the image classifier, one by one."""

    recipe: RecipeName = None


@dataclass(frozen=True, kw_only=True)
class ClassifierFlags(ProgramFlags):
    """Flags of the training of the built-in image classifier."""

    KIND: ClassVar[str] = "classifier"
    MODULE: ClassVar[str] = "training"
    TITLE: ClassVar[str] = "image classifier"
    ADJUSTABLE: ClassVar[type[Any]] = Adjustable
    """The dataclass of the flags that `hpc resume` may set."""
    FIXED: ClassVar[frozenset[str]] = frozenset({"recipe", *IDENTIFYING, *OF_THE_BEGINNING})
    """The fields whose flags only a new training may set."""

    recipe: RecipeName = None
    train: TrainConfig

    @classmethod
    def of_run(cls, spec: RunSpec) -> Self:
        """Return the flags of a training or an evaluation."""
        own = [word for word in spec.program.argv[2:] if word not in {*_RANK_WORDS, _DATA_WORD}]
        flags = command_line.read((RankOptions,), [word.replace(BRACE, "{") for word in own], "training")
        data = {} if spec.data is None else {"data": spec.data}
        return command_line.build(cls, {**flags, **data})

    @classmethod
    def preset(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the flags of the recipe, and a data set if the flags name none."""
        return preset(settings, flag_names(cls))

    def as_program(self) -> Program:
        """Return the program of the training or, if the run has a task for one, of the evaluation."""
        recipe = [] if self.recipe is None else [f"--recipe={self.recipe}"]
        own = (word.replace("{", BRACE) for word in train_words(self.train) if not word.startswith("--data="))
        return Program(
            built_in=self.KIND,
            argv=("-m", self.MODULE, *_RANK_WORDS, *([] if self.train.synthetic else [_DATA_WORD]), *recipe, *own),
            preload=_preload(self.train),
            exit_codes=EXIT_CODES,
            reports_steps=True,
            writes_result=True,
        )

    def check_installed(self) -> None:
        """Raise UserError if the packages of the classifier are not installed."""
        need_classifier("a training without a script")

    def resolve(self) -> ResolvedProgram:
        """Check the model, the weights and the data. Raises UserError at the first mistake."""
        self.check_installed()
        train = self.train
        check_model(train.model)
        data = data_checks.training_data(train)
        # The nodes may have another cache of weights than this machine, so they get a path.
        weights = resolve_weights(train.model, train.weights) if train.weights else None
        train = replace(train, data=str(data or ""), weights=str(weights) if weights else train.weights)
        return ResolvedProgram(
            program=replace(self, train=train).as_program(),
            name=train.model,
            data=data,
            files={} if weights is None else {"--weights": weights},
        )

    def with_values(self, values: Mapping[str, str]) -> Self:
        """Return the flags with these values for the flags of the training."""
        for name in values:
            if name.replace("-", "_") not in {field.name for field in fields(TrainConfig)}:
                raise UserError(f"--param {name}: there is no training flag --{name}; hpc sweep --help-all lists them")
        flags = {name.replace("_", "-"): value for name, value in values.items()}
        return command_line.build(type(self), {**command_line.values_of(self), **flags})

    def of_size(self, places: Mapping[str, str], *, growth: float, minutes: float) -> Self:  # noqa: ARG002
        """Return the flags with a batch that has grown, and with an end after some minutes."""
        batch_size, hours = round(self.train.batch_size * growth), float(f"{minutes / 60:.6g}")
        return replace(self, train=replace(self.train, batch_size=batch_size, max_hours=hours))

    def with_arguments(self, words: Sequence[str]) -> Self:
        """Return the flags, of which `words` replace some."""
        typed = command_line.read((type(self),), words, "hpc fork")
        if "recipe" in typed:
            raise UserError("--recipe is only for new trainings: give the flags that change instead")
        return command_line.build(type(self), {**command_line.values_of(self), **typed})

    def adjusted(self, changes: Mapping[str, Any], begun: Begun) -> Self:
        """Return the flags with which a training goes on. A complete one must have steps left to do."""
        need_classifier(f"run {begun.run.name}")
        for name in sorted(changes.keys() - command_line.default_values(TrainConfig).keys()):
            raise UserError(f"--{name} is only for new trainings: leave it out")
        refuse_on_resume(changes.keys(), begun.typed, begun.run.best)
        after = command_line.build(type(self), {**command_line.values_of(self), **changes})
        if (task := EvaluationTask.load(begun.run.model)) is not None:
            if begun.complete:
                raise UserError(f"run {begun.run.name} is a complete evaluation: type hpc evaluate {task.source} again")
            return after
        epoch = (last_json_line(begun.run.train_metrics) or {}).get("epoch", 0)
        check_adjusted(self.train, after.train, begun, epoch)
        return after

    def describe(self) -> list[str]:
        """Return the model, the data, and what decides about the result."""
        train = self.train
        data = (title_of(Path(train.data)) if train.data else "generated images") or train.data
        return [
            f"{train.model} on {data}",
            f"{train.epochs} epochs, batch size {train.batch_size:,}",
            f"{train.optimizer}, lr {highest_learning_rate(train):.3g}",
            f"seed {train.seed}",
        ]

    def announcement(self) -> list[str]:
        """Return a line with the title of a data set that has one."""
        title = title_of(resolve_data(self.train.data)) if self.train.data else None
        return [f"training {self.train.model} on {title}; use --data PATH for your own images"] if title else []

    def check_ranks(self, ranks: int, *, has_gpus: bool) -> None:
        """Raise UserError if the global batch is too small for so many ranks, or a flag needs GPUs."""
        check_world(self.train, ranks)
        check_device(self.train, has_gpus=has_gpus)

    def warnings(self) -> list[str]:
        """Return warnings about flags without effect, and about classes without images."""
        return without_effect(self.train) + data_checks.class_warnings(self.train)

    def check_fork(self, changed: Collection[str], run: RunDir) -> None:
        """Raise UserError if one of the changed flags decides what the saved state is."""
        if (task := EvaluationTask.load(run.model)) is not None:
            raise UserError(f"run {run.name} is an evaluation: fork the run that it evaluated, {task.source}")
        refuse_on_fork([name.replace("-", "_") for name in changed], run.best)

    def check_start(self, saved: Mapping[str, Any], checkpoint: str) -> None:
        """Raise UserError if the training would already be complete at the checkpoint."""
        epochs_done = saved["progress"]["epoch"]
        if epochs_done >= self.train.epochs:
            raise UserError(
                f"--epochs is {self.train.epochs}, but {checkpoint} is after epoch {epochs_done}: "
                f"use --epochs {epochs_done + 1} or more"
            )


def _preload(train: TrainConfig) -> tuple[str, ...]:
    """Return the modules that all ranks need. The process that forks the ranks imports them once per node."""
    library: tuple[str, ...] = TORCHVISION
    if train.model.startswith(TIMM):
        library = ("timm", *TORCHVISION)
    elif train.model in OWN_MODELS and train.auto_augment == "none" and not train.color_jitter:
        library = ()
    return (*(LIBRARIES if needs_compiler(train) else (_WITHOUT_COMPILER,)), *_TRAINER, *library)
