"""Owns a script's position in its loops over epochs and batches, and restores it. Runs on every rank."""

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from .saving.objects import Saveable
from .saving.values import random_states, restore_random
from .stateful_workers import save_workers_random_states
from .this_rank import THIS_RANK, warn

Batch = TypeVar("Batch")

# Gradients are not accumulated over more batches. Where a CUDA graph repeats the optimizer's steps, torch reports none.
_MAX_BATCHES_PER_STEP = 256
# What a loader draws from is not in longer lists, such as those of a data set's files.
_MAX_LENGTH = 100


class LoopPosition:
    """Counts epochs and their batches, and skips the batches that were used before the state was saved."""

    def __init__(self, objects: Mapping[str, Saveable]) -> None:
        """`objects` are those that are saved with the position."""
        self.epoch = 0
        """The epoch that is not finished yet."""
        self._objects = objects
        self._batches, self._to_skip = 0, 0
        # States of the random number generators: at the start of the epoch, at the start of its batches, and after the
        # restore. The training continues with the last one.
        self._at_epoch = dict[str, Any]()
        self._at_batches = dict[str, Any]()
        self._now = dict[str, Any]()
        self._generators = list[Any]()
        """The loader's own random number generators."""
        self._since_step = 0
        """The number of batches since an optimizer has stepped."""
        self._has_optimizer = False
        if THIS_RANK.run_dir is not None:
            self._watch_optimizers()
            for name, each in objects.items():
                save_workers_random_states(name, each)

    def _watch_optimizers(self) -> None:
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

        def count(*_: Any) -> None:
            self._since_step, self._has_optimizer = 0, True

        self._has_optimizer = any(isinstance(each, Optimizer) for each in self._objects.values())
        register_optimizer_step_post_hook(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the random number generators' states at the start of the epoch and its batches."""
        return {
            "epoch": self.epoch, "batches": self._batches, "world_size": THIS_RANK.world_size,
            "at_epoch": self._at_epoch, "at_batches": self._at_batches,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the position. With another number of ranks, the same share of the epoch's data counts as used."""
        self.epoch = state["epoch"]
        self._batches = self._to_skip = state["batches"] * state["world_size"] // THIS_RANK.world_size
        self._at_epoch, self._at_batches = state["at_epoch"], state["at_batches"]

    @property
    def is_open(self) -> bool:
        """Whether a training that continues from a state saved now would differ.

        It would lack gradients that wait for the optimizer's step. At the end of an epoch, it would not know the states
        of the loader's own generators, which the script may set before it calls `batches` again.
        """
        accumulates = self._has_optimizer and 0 < self._since_step <= _MAX_BATCHES_PER_STEP
        return accumulates or bool(self._generators and not self._batches)

    def begin_epoch(self) -> None:
        """Begin an epoch. An interrupted epoch begins again with the random states with which it first began."""
        if self._to_skip and self._at_epoch:
            self._now = random_states()
            restore_random(self._at_epoch)
        else:
            self._at_epoch = random_states()

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch, self._batches, self._to_skip = self.epoch + 1, 0, 0

    def end_epochs(self) -> None:
        """Leave the loop over epochs: no batch follows."""
        self._generators, self._since_step = [], 0

    def batches(self, loader: Iterable[Batch], *, skipped: Callable[[], object]) -> Iterator[Batch]:
        """Yield the batches of an epoch.

        If the loader is no saved object, the used batches are loaded and skipped, and `skipped` is called for each.
        After a restore, loading starts with the random states of the earlier attempt. So a loader repeats its order,
        and its workers repeat their random transforms. The training then continues with its own random states. Raises
        ValueError if a saved object is a part of the loader.
        """
        here = random_states()
        now = (self._now or here) if self._to_skip else None
        self._now = {}
        parts = _parts(loader)
        _check_unsaved(self._objects, loader, parts)
        saved_loader = next((each for each in self._objects.values() if id(each) == id(loader)), None)
        if saved_loader is not None:
            self._to_skip, self._generators = 0, []
            # A restored StatefulDataLoader makes the iterator of its state here, and draws a random number for it. If
            # that epoch was at its end, `iter` then makes the next iterator, and must draw the same number as at first.
            saved_loader.state_dict()
            restore_random(here)
        else:
            self._generators = [each for each in parts if _is_generator(each)]
        if self._to_skip:
            restore_random(self._at_batches)
            for generator, state in zip(self._generators, self._at_batches.get("generators", ()), strict=False):
                restore = generator.setstate if isinstance(generator, random.Random) else generator.set_state
                restore(state)
        else:
            self._at_batches = {**here, "generators": tuple(map(_get_state, self._generators))}
        batches = iter(loader)
        # If an epoch has several loaders, the first ones may have no batches left.
        for _ in islice(batches, self._to_skip):
            self._to_skip -= 1
            skipped()
        if now:
            restore_random(now)
        for batch in batches:
            self._batches += 1
            self._since_step += 1
            if self._has_optimizer and self._since_step == _MAX_BATCHES_PER_STEP + 1:
                warn(
                    f"no optimizer has stepped for {_MAX_BATCHES_PER_STEP} batches: the state is saved without their "
                    "gradients. If you accumulate more of them, do not use batches(), but call should_stop() after "
                    "each step of the optimizer"
                )
            yield batch


def _parts(loader: object) -> list[object]:
    """Return a loader and what it iterates over: iterators, samplers, data sets, and what these hold."""
    from torch import Tensor, nn

    parts, rest = dict[int, object](), [loader]
    while rest:
        part = rest.pop()
        if id(part) in parts:
            continue
        parts[id(part)] = part
        is_long = isinstance(part, list | tuple | dict | set) and len(part) > _MAX_LENGTH
        if _is_iterable(part) and not is_long and not isinstance(part, str | bytes | type | Tensor | nn.Module):
            rest += gc.get_referents(part)  # also of generator expressions and of iterators in C, such as islice
    return list(parts.values())


def _is_iterable(one: object) -> bool:
    return hasattr(type(one), "__iter__") or hasattr(type(one), "__getitem__")


def _check_unsaved(objects: Mapping[str, Saveable], loader: object, parts: list[object]) -> None:
    """Raise ValueError if one of the objects is a part of a loader, but not the loader itself."""
    from torch import nn

    ids = set(map(id, parts))
    for name, each in objects.items():
        if each is loader or not _is_iterable(each) or isinstance(each, nn.Module):
            continue
        # The iterator of a saved loader does not hold the loader, but its sampler.
        own = (each, getattr(each, "sampler", None), getattr(each, "batch_sampler", None))
        if any(part is not None and id(part) in ids for part in own):
            raise ValueError(
                f"state({name}=...) and batches() would both restore the position in the data, so that some would be "
                f"skipped twice. Leave {name} out of state(): batches() repeats an order that depends on the epoch "
                "(set_epoch), on the random numbers of torch or Python, or on a torch.Generator of the sampler. If "
                f"{name} is a StatefulDataLoader, you can also pass it to batches() as it is"
            )


def _is_generator(one: object) -> bool:
    """Return whether this is a random number generator of torch or Python."""
    from torch import Generator

    return isinstance(one, Generator) or type(one) is random.Random


def _get_state(generator: Any) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
