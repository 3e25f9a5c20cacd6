"""The command line of `python -m training` and of the programs that take the same flags. Runs where they run.

Flags also come from YAML files: `--config FILE.yaml`, and recipes (`--recipe NAME`).
Ranks that a node agent starts read `spec.json` instead (`training.config.training_spec`): this module imports tyro and
YAML, which takes a quarter of a second.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml

from hpc.core import program
from hpc.core.errors import UserError
from training.config.dataset_layout import DIGITS, FASHION_MNIST, FASHION_MNIST_DIRECTORY
from training.config.model_names import check_model
from training.config.train_config import RankOptions, TrainConfig

_REPEATABLE = {"include", "sbatch", "setup"}
_RECIPES = Path(__file__).with_name("recipes")


# --- flags of other trainers ---

# The flag to type here, and its names in torchvision's references, timm, Lightning and Accelerate, and in earlier
# versions of Torchrelay.
_OTHER_NAMES: dict[str, str] = {
    "use --data": "data-dir data-path",
    "use --model": "arch",
    "use --weights with a file or a name such as IMAGENET1K_V1": "pretrained initial-checkpoint",
    "use --freeze-backbone": "freeze",
    "use --epochs": "max-epochs num-epochs",
    "use --batch-size, the images of all ranks together": "batch b",
    "use --lr": "learning-rate",
    "use --lr-scheduler": "sched schedule",
    "use --lr-step-epochs": "decay-epochs decay-milestones drop-epochs lr-milestones lr-step-size",
    "use --lr-gamma": "decay-rate drop-factor",
    "use --early-stopping-patience": "patience",
    "use --warmup-epochs": "lr-warmup-epochs",
    "use --optimizer": "opt",
    "use --weight-decay": "wd",
    "use --adam-beta2; --momentum is beta1": "adam-betas betas opt-betas",
    "use --min-lr": "eta-min lr-min",
    "use --layer-decay": "layer-decay-rate llrd",
    "use --decay-norm-and-bias": "bias-weight-decay norm-weight-decay decay-all",
    "use --loss bce": "bce-loss",
    "use --class-weights balanced": "class-weight",
    "use --checkpoint-activations": "activation-checkpointing grad-checkpointing gradient-checkpointing",
    "use --drop-path": "drop-path-rate stochastic-depth-prob",
    "use --label-smoothing": "smoothing",
    "use --clip-grad-norm": "clip-grad clip-norm gradient-clip-val",
    "use --grad-accum-steps": "accumulate accumulate-grad-batches gradient-accumulation-steps",
    "use --ema-decay 0.999": "ema model-ema",
    "use --sync-bn": "sync-batchnorm",
    "use --amp bf16 or --amp fp16": "precision mixed-precision bf16 fp16",
    "use --auto-augment": "aa policy",
    "use --randaugment-magnitude": "ra-magnitude",
    "use --random-erasing": "random-erase reprob",
    "use --repeated-augmentation 4": "ra-sampler",
    "use --repeated-augmentation": "aug-repeats ra-reps",
    "use --mixup": "mixup-alpha",
    "use --cutmix": "cutmix-alpha",
    "use --image-size": "img-size train-crop-size",
    "use --eval-image-size": "eval-size val-crop-size",
    "use --crop-scale MIN,MAX": "scale",
    "use --crop-ratio MIN,MAX": "ratio",
    "use --eval-crop-pct with the side of the crop by that of the resized image, such as 0.875": (
        "crop-pct eval-crop val-resize-size"
    ),
    "use --deterministic off, warn or error": "repeatability",
    "use --fsdp-sharding full or hybrid": "fsdp-mesh",
    "use --interpolation": "train-interpolation",
    "use --val-split": "val-fraction",
    "use --max-corrupt-images": "max-corrupt",
    "use --num-workers": "j workers",
    "use --log-every": "log-every-n-steps log-interval print-freq",
    "use --keep-checkpoints": "checkpoint-hist save-top-k",
    "use --runs-dir and --name of hpc submit, or --run-dir of hpc train": "output output-dir default-root-dir",
    "use --nodes of hpc submit": "nnodes num-nodes num-machines",
    "use --gpus-per-node of hpc submit, or torchrun --nproc-per-node": "devices gpus nproc-per-node num-processes",
    "use --cpus-per-gpu of hpc submit": "cpus-per-task",
    "use --in-place of hpc submit": "no-snapshot",
    "use --grace-period of hpc submit": "grace",
    "use --signal-before of hpc submit": "stop-lead",
    "use --help-all of hpc submit": "help-train",
    "leave it out: a run resumes from its newest checkpoint by itself (to begin from a file, use --weights)": (
        "resume resume-from-checkpoint ckpt-path"
    ),
    "leave it out: the classes are the directories of --data": "num-classes",
    "leave it out: each node and rank is found through --nodes of hpc submit, or torchrun": "dist-url local-rank",
}
ADVICE: dict[str, str] = {name: advice for advice, names in _OTHER_NAMES.items() for name in names.split()}


def check_names(arguments: Sequence[str], known: Collection[str]) -> None:
    """Refuse flags that have another name here; `known` are those that exist, without dashes.

    Raises:
        UserError: names the flag to type.
    """
    for argument in arguments:
        typed = argument.partition("=")[0]
        name = typed.lstrip("-").replace("_", "-")
        if typed.startswith("-") and name not in known and (advice := advice_for(name, known)):
            raise UserError(f"there is no flag {typed}: {advice}")


def advice_for(name: str, known: Collection[str]) -> str | None:
    """What to type instead of a flag; None: nothing that this program takes."""
    advice = ADVICE.get(name)
    # A script of the user's own has its own training flags.
    return advice if advice and ("lr" in known or "hpc submit" in advice) else None


# --- flags from files ---


@cache
def recipes() -> tuple[str, ...]:
    """Their names."""
    return tuple(sorted(path.stem for path in _RECIPES.glob("*.yaml")))


def recipe_path(name: str) -> Path:
    """The file of a recipe.

    Raises:
        UserError: no recipe has this name.
    """
    if name not in recipes():
        close = difflib.get_close_matches(name, recipes(), n=3, cutoff=0.5) or recipes()
        raise UserError(f"--recipe is {name!r}, which is not known: use {', '.join(close)}")
    return _RECIPES / f"{name}.yaml"


def flag_names(options: type[Any]) -> dict[str, bool]:
    """The flags of a dataclass that may stand in a file; True for switches."""
    return {field.name.replace("_", "-"): field.type is bool for field in program.flags(options)}


def with_config(
    arguments: list[str], known: Mapping[str, bool], defaults: Mapping[str, Any] | None = None
) -> list[str]:
    """Put `defaults` and the flags of `--recipe` and `--config` before those of the command line, which win.

    A file may name its recipe. `--no-NAME` on the command line takes back a switch that a file has turned on. `known`
    are the flags that may stand in a file, without dashes; True for switches, which take no value. Other defaults are
    left out.

    Raises:
        UserError: a file cannot be read or has an unknown flag, the recipe does not exist, or a flag of the command
            line has another name here.
    """
    check_names(arguments, known)
    config = last_value(arguments, "--config")
    settings = read_settings("--config", Path(config), known) if config is not None else {}
    named = settings.pop("recipe", None)
    recipe = last_value(arguments, "--recipe") or named
    if recipe:
        settings = overlay(read_settings("--recipe", recipe_path(recipe), known), settings)
    settings = overlay({name: value for name, value in (defaults or {}).items() if name in known}, settings)
    off = {f"--no-{name}": name for name, switch in known.items() if switch}
    for argument in arguments:
        settings.pop(off.get(argument, ""), None)
    flags = [f"--recipe={named}"] if named else []
    for name, value in settings.items():
        if known[name]:
            flags += [f"--{name}"] if value == "true" else []
        else:
            flags += [f"--{name}={item}" for item in (value if isinstance(value, list) else [value]) if item != ""]
    return flags + [argument for argument in arguments if argument not in off]


def with_data(arguments: list[str], known: Mapping[str, bool]) -> list[str]:
    """Add a data set to the flags of a training that name none.

    It is Fashion-MNIST where Debian's copy is installed, else scikit-learn's digits, with the flags of their recipe.
    """
    if {"data", "synthetic", "recipe"} & typed_names(arguments):
        return arguments
    if FASHION_MNIST_DIRECTORY.is_dir():
        return [f"--data={FASHION_MNIST}", *arguments]
    return [*with_config([f"--recipe={DIGITS}"], known), *arguments]


def typed_names(arguments: Sequence[str]) -> set[str]:
    """The flags that a command line has, without their dashes, `--no-` and values."""
    words = (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    return {word[2:].removeprefix("no-").replace("_", "-") for word in words}


def last_value(arguments: list[str], flag: str) -> str | None:
    """The value of the last occurrence of a flag; None if it does not occur."""
    positions = [i for i, argument in enumerate(arguments) if argument == flag or argument.startswith(f"{flag}=")]
    if not positions:
        return None
    last = positions[-1]
    return arguments[last].partition("=")[2] or next(iter(arguments[last + 1 :]), "")


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both: those of `over` win, and repeatable flags have those of both."""
    both = {name: [*base[name], *over[name]] for name in _REPEATABLE & base.keys() & over.keys()}
    return {**base, **over, **both}


def read_settings(flag: str, path: Path, known: Mapping[str, bool] | None) -> dict[str, Any]:
    """The settings of a file, by the names of flags: `batch_size: 256` is that of `--batch-size`.

    Raises:
        UserError: the file cannot be read, or has a flag that is not `known`, if that is given.
    """
    where = f"{flag} {path}"
    try:
        # As text, which tyro parses as it does a command line's: YAML itself would make 43200 of a time of 12:00:00.
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506 - text alone
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    if not isinstance(loaded, dict | None):
        raise UserError(f"{where} is not a mapping: write lines such as `batch-size: 256`")
    settings = {}
    for key, value in (loaded or {}).items():
        name = str(key).replace("_", "-")
        if known is not None and name not in {*known, "recipe"}:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            similar = f"did you mean {', '.join(close)}?" if close else "see hpc submit --help"
            raise UserError(f"{where}: there is no flag {key!r}: {advice_for(name, known) or similar}")
        # Nested lists can repeat each other (YAML aliases), so that their text would not fit in memory.
        if not all(isinstance(each, str) for each in (value if isinstance(value, list) else [value])):
            raise UserError(f"{where}: {key} is nested: give one value, or a list for --sbatch and --setup")
        if known and known.get(name) and value not in {"true", "false"}:
            raise UserError(f"{where}: {name} is {value!r}: write true or false")
        settings[name] = [value] if name in _REPEATABLE and isinstance(value, str) else value
    return settings


# --- parsing ---


# What `--recipe` takes, wherever flags are read.
RecipeName = Annotated[
    str | None,
    tyro.conf.arg(
        help=f"Flags of a training that is known to work: {', '.join(recipes())} (docs/how-to/image-classifier.md).",
        metavar="NAME",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """The training flags, from the command line and files."""

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    recipe: RecipeName = None
    config: Path | None = None
    """YAML file of flags. It overrides --recipe; the command line overrides both."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainFlags, RankOptions):
    """Train an image classifier, with one process or under torchrun.

    Resumes from the newest checkpoint in the run directory. On SIGTERM and SIGUSR2 it saves and stops.
    """


Options = TypeVar("Options", bound=TrainFlags)


def parse_flags(options: type[Options], argv: Sequence[str], prog: str, *, prints: bool = True) -> Options:
    """Parse a command line that holds training flags; ranks other than 0 print no help (`prints`).

    Raises:
        UserError: a flag is wrong, or no model has the given name.
    """
    known = flag_names(TrainConfig)
    parsed = program.parse(options, with_data(with_config(list(argv), known), known), prog, prints=prints)
    check_model(parsed.train.model)
    return parsed
