"""Loads a model to evaluate: weights, or a checkpoint. Runs on every rank."""

from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torchrelay.saving.restoring import read_state

from hpc.base.errors import UserError
from hpc.run.rundir import MODEL_CARD, MODEL_WEIGHTS
from training.config.train_config import TrainConfig
from training.inference.model_card import ModelCard, read_card
from training.models.factory import Preprocess, build_model, first_line, per_channel
from training.models.parallel import load_full_state_dict, place_model
from training.runtime.process_group import ProcessGroup

# The parts of a checkpoint that hold weights. Evaluations prefer the moving average, so it is first.
_PARTS = ("ema/", "model/")


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model that is ready for an `Evaluator`."""

    card: ModelCard
    config: TrainConfig
    """The flags, with the model's precision and strategy."""
    model: nn.Module
    preprocess: Preprocess


def load_model(directory: Path, config: TrainConfig, group: ProcessGroup) -> EvaluatedModel:
    """Load the model in the directory that `hpc evaluate` has filled. All ranks must call this.

    Raises SharedError on all ranks, if a file is damaged, or a rank's node lacks a package.
    """
    with group.raise_on_all_ranks():
        card = read_card((directory / MODEL_CARD).read_text(encoding="utf-8"), str(directory / MODEL_CARD))
        weights = _read_weights(directory)
        trained = card.config()
        same = {name: getattr(trained, name) for name in ("model", "head_hidden", "weights", "amp")}
        # The training's batch size limits evaluation batches and so affects the last bits.
        batch_size = card.made_from.get("config", {}).get("batch_size", config.batch_size)
        built = replace(config, batch_size=batch_size, **same)
        model = build_model(built, classes=len(card.classes), channels=card.channels, size=card.size)
    model = place_model(model, built, group)
    with group.raise_on_all_ranks():
        try:
            load_full_state_dict(model, weights.items(), sharded=built.strategy == "fsdp")
        except RuntimeError as error:
            raise UserError(f"the weights in {directory} are not those of {card.model}: {first_line(error)}") from error
    preprocess = Preprocess(
        mean=per_channel(card.mean, group.device), std=per_channel(card.std, group.device),
        channels=card.channels, size=card.size, interpolation=card.interpolation,
    )  # fmt: skip
    return EvaluatedModel(card=card, config=built, model=model, preprocess=preprocess)


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Return a model's tensors by name, on the CPU, from its own file or a checkpoint."""
    try:
        if (directory / MODEL_WEIGHTS).exists():
            return load_file(directory / MODEL_WEIGHTS)
        state = read_state(directory)[0]
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{directory} cannot be loaded ({first_line(error)}): evaluate again") from error
    part = next(part for part in _PARTS if any(name.startswith(part) for name in state))
    return {name.removeprefix(part): value for name, value in state.items() if name.startswith(part)}
