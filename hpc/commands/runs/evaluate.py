"""`hpc evaluate`: submit a run that evaluates the model of another run. Runs on the login node.

The evaluation is a run of its own: it is staged, started, interrupted and continued like a training, and commands such
as `hpc status` accept it. It has hard links to the other run's model, so the other run may continue or be removed
meanwhile. The evaluation never changes the other run.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

from torchrelay.checkpoint_files import STATE_VALUES, checkpoint_path, find_damage, list_checkpoints, step_of

from hpc.base import program
from hpc.base.errors import UserError, need_classifier
from hpc.base.files import expanded, link_files
from hpc.base.flags import INTERNAL, POSITIONAL, Flag
from hpc.base.text import few
from hpc.commands import cli
from hpc.programs.program_kinds import program_of_run, settings_of
from hpc.run.rundir import MODEL_CARD, MODEL_WEIGHTS, RunDir
from hpc.run.spec import RunSpec, program_of
from hpc.sources.source_files import is_archive
from hpc.submissions.new_run import NewRun, show, start_run
from hpc.submissions.options import SubmitOptions
from hpc.submissions.sbatch.sbatch_advice import explain
from training.config.classifier_program import ClassifierFlags
from training.config.dataset_layout import check_data, resolve_data
from training.config.evaluation_task import EvaluationTask, SplitChoice, choose_split
from training.config.train_config import TrainConfig

# Flags about how to get a node, which the evaluation takes from the other run. It has its own --nodes and --time.
_SAME_SETTINGS = (
    "cluster", "gpus-per-node", "cpus-per-gpu", "mem", "partition", "account", "qos", "constraint", "exclude", "sbatch",
    "setup", "interface", "port-range", "stage-dir", "stage-keep", "device", "stage-env",
)  # fmt: skip
# Flags of the classifier that the evaluation takes from the other run.
_SAME_TRAINING = (
    "model", "seed", "val_split", "strategy", "deterministic", "tf32", "amp", "head_hidden", "num_workers",
    "max_corrupt_images",
)  # fmt: skip
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SubmitOptions):
    """Evaluate the model of a run. Each image counts exactly once on any number of ranks.

    For example:
      hpc evaluate first
      hpc evaluate first --checkpoint 1200 --data /shared/imagenet-v2 --gpus-per-node 4 --wait

    The evaluation is a run, too: hpc status, hpc logs and hpc report show it. It uses one node. Other resources that
    you do not give, such as --partition and --gpus-per-node, are those of the evaluated run.
    """

    # An evaluation has no script and no file of flags.
    REFUSED = frozenset({"python", "container", "config", "help_all"})

    program: Annotated[Any, INTERNAL] = None  # `evaluate` makes it
    run: Annotated[str, POSITIONAL]
    """Directory or name of a run, which may still be running."""
    checkpoint: Annotated[str, Flag(metavar="WHICH")] = "best"
    """Model to evaluate: best (by validation), last (the final model or newest checkpoint), or a checkpoint's step."""
    data: Annotated[str | None, Flag(metavar="PATH")] = None
    """Images to evaluate on, of classes that the model knows. Default: the data of the evaluated run."""
    split: SplitChoice = "auto"
    """Part of the data. auto: test, or val if there is no test part, or all images if --data has neither."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The run to evaluate."""

    run: RunDir
    spec: RunSpec
    trained: TrainConfig
    """The flags of the training."""


def options_of(given: Mapping[str, Any]) -> EvaluateOptions:
    """Complete the given flags with settings of the evaluated run. Raises UserError if a flag is wrong."""
    if "config" in given:
        raise UserError("--config is only for new trainings: give the flags instead")
    subject = find_subject(given["run"], cli.runs_dir(given))
    settings = settings_of(subject.spec)
    own = {name: settings[name] for name in _SAME_SETTINGS}
    return program.build(EvaluateOptions, {"runs-dir": subject.run.path.parent, **own, **given})


def find_subject(name: str, runs_dir: Path) -> Subject:
    """Return the run called `name`, with its spec and its training flags.

    Raises:
        UserError: there is no such run, or it is itself an evaluation, or it runs a user's script.
    """
    run = cli.find_run(name, runs_dir)
    spec = RunSpec.load(run)
    if (task := EvaluationTask.load(run.model)) is not None:
        raise UserError(f"run {name} is itself an evaluation: evaluate {task.source}")
    trained = program_of_run(spec)
    if not isinstance(trained, ClassifierFlags):
        raise UserError(
            f"run {name} runs {program_of(spec.script)}, and only that script knows its model: evaluate it with your "
            "own script, hpc submit -- script.py"
        )
    return Subject(run=run, spec=spec, trained=trained.train)


def evaluate(options: EvaluateOptions) -> NewRun:
    """Submit the evaluation. Raises as `start_run`, and UserError if there is no such model or no such data."""
    need_classifier("an evaluation")
    subject = find_subject(options.run, options.runs_dir)
    task = EvaluationTask(
        source=str(subject.run.path), checkpoint=options.checkpoint, split=options.split,
        other_data=options.data is not None,
    )  # fmt: skip
    train = _settings(options, subject)
    if not is_archive(Path(train.data)):
        choose_split(task, check_data(resolve_data(train.data)), train.val_split)
    name = options.name or _free_name(options, subject.run)
    submission = replace(options, name=name, program=ClassifierFlags(train=train))
    find_model(subject.run, options.checkpoint)  # before the run directory is made, also in a dry run
    return start_run(submission, partial(_give_model, subject.run, task))


def _settings(options: EvaluateOptions, subject: Subject) -> TrainConfig:
    data = options.data or subject.spec.data
    if data is None:
        raise UserError(f"run {subject.run.name} was trained on generated images: use --data PATH")
    same: dict[str, Any] = {name: getattr(subject.trained, name) for name in _SAME_TRAINING}
    if options.data is not None:
        same["val_split"] = 0.0  # the training has seen no image of other data
    ranks = options.resources.nodes.most * options.resources.ranks_per_node
    return TrainConfig(**same, data=data, batch_size=256 * ranks)


def _free_name(options: EvaluateOptions, run: RunDir) -> str:
    """Return a name such as `evaluate-first-best`, with a number at its end if the name is taken."""
    first = f"evaluate-{run.name}-{options.checkpoint}"
    names = chain([first], (f"{first}-{number}" for number in count(2)))
    return next(name for name in names if not os.path.lexists(expanded(options.runs_dir) / name))


def find_model(run: RunDir, checkpoint: str) -> list[Path]:
    """Return the directories that may have the model that `checkpoint` names, in the order in which to try them.

    Raises:
        UserError: there is no such model, or no description of it yet.
    """
    if checkpoint not in {"best", "last"} and not checkpoint.isdecimal():
        raise UserError(f"--checkpoint is {checkpoint!r}: use best, last, or the step of a checkpoint")
    saved = list_checkpoints(run.checkpoints)
    if checkpoint == "best":
        found = [run.best] if (run.best / MODEL_CARD).is_file() else []
        missing = "has no best model, because no validation has chosen one: use --checkpoint last"
    elif checkpoint == "last":
        found = [run.final] if run.final_result.is_file() else saved
        missing = "has neither a final model nor a checkpoint yet: wait for the first one"
    else:
        path = checkpoint_path(run.checkpoints, int(checkpoint))
        found = [path] if path.is_dir() else []
        missing = (
            f"has no checkpoint of step {checkpoint}: it has {few([str(step_of(one)) for one in saved]) or 'none'}"
        )
        if run.final_result.is_file() and _progress(run.final).get("step") == int(checkpoint):
            found = [run.final]
    if not found:
        raise UserError(f"run {run.name} {missing}")
    if _card(run) is None:
        raise UserError(
            f"run {run.name} has no {MODEL_CARD} yet, which describes its model: wait for its first validation, or "
            "without validation for its end"
        )
    return found


def _card(run: RunDir) -> Path | None:
    """Return the file that describes all models of a run; None if there is none yet."""
    cards = (directory / MODEL_CARD for directory in (run.final, run.best))
    return next((card for card in cards if card.is_file()), None)


def _progress(directory: Path) -> dict[str, Any]:
    """Return the step and the epoch of a model; empty if its directory does not have them."""
    with suppress(OSError, ValueError, LookupError):
        if (directory / STATE_VALUES).exists():
            values = json.loads((directory / STATE_VALUES).read_bytes())["objects"]["progress"]
        else:
            values = json.loads((directory / "result.json").read_bytes())
        return {name: int(values[name]) for name in ("step", "epoch")}
    return {}


def _give_model(source: RunDir, task: EvaluationTask, run: RunDir, spec: RunSpec) -> RunSpec:
    """Put the model into the new run's directory. Returns the new run's spec with the evaluation.

    Raises:
        UserError: the model is damaged, or has gone meanwhile.
    """
    for _ in range(_TRIES):
        # The other run, if it trains, may replace or delete the model meanwhile: then it has a newer one.
        for directory in find_model(source, task.checkpoint):
            with suppress(FileNotFoundError):
                link_files(directory, run.model)
                if _is_whole(source, run):
                    replace(task, **_progress(run.model)).save(run.model)
                    return spec
            shutil.rmtree(run.model, ignore_errors=True)
    raise UserError(f"the model {task.checkpoint} of run {source.name} is damaged: use another --checkpoint")


def _is_whole(source: RunDir, run: RunDir) -> bool:
    """Return whether the new run's model is whole. Give a whole checkpoint a copy of the model card, which it lacks."""
    if (run.model / STATE_VALUES).exists():
        card = _card(source)
        if find_damage(run.model) or card is None:
            return False
        shutil.copyfile(card, run.model / MODEL_CARD)
        return True
    return (run.model / MODEL_CARD).is_file() and (run.model / MODEL_WEIGHTS).is_file()


main = partial(
    cli.run, lambda options: show(evaluate(options), options), EvaluateOptions, "evaluate", complete=options_of,
    explain=explain,
)  # fmt: skip
