"""A run's settings as the flags that give them: to submit it again, or to put them before those that a user types.

Pure; runs on the login node.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hpc.spec import RunSpec
from training.config.command_line import typed_names
from training.config.rules import flag


def flags_of(spec: RunSpec) -> list[str]:
    """Every setting that is not the default, also those that submit has chosen, without a user's script."""
    flags = [f"--cluster={spec.cluster}", *([f"--data={spec.data}"] if spec.data and spec.train is None else [])]
    flags += [*(changed_flags(spec.train) if spec.train else []), *changed_flags(spec.resources)]
    flags += [*changed_flags(spec.recovery), *changed_flags(spec.network), *changed_flags(spec.notification)]
    flags += [f"--stage-dir={spec.stage_dir}"] if spec.stage_dir != "/tmp" else []  # noqa: S108 - submit's default
    flags += [f"--stage-keep={spec.stage_keep}"] if spec.stage_keep != "7d" else []
    flags += [f"--stage-timeout={spec.stage_timeout}"] if spec.stage_timeout != "5m" else []
    flags += [] if spec.pack is None else ["--pack=on", f"--pack-size={spec.pack}"]
    flags += ["--device=cpu"] if spec.device == "cpu" else []
    flags += ["--stage-env"] if spec.stage_env else []
    flags += [f"--python={spec.python}"] if spec.python else []
    flags += [f"--container={spec.container}"] if spec.container else []
    flags += [f"--include={pattern}" for pattern in spec.include] + (["--in-place"] if spec.in_place else [])
    return flags


def changed_flags(settings: Any, names: Collection[str] = ()) -> list[str]:
    """The flags of a dataclass's fields that differ from their defaults; one for each item of a tuple.

    With `names`, of these fields alone.
    """
    words = list[str]()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value == field.default or (names and field.name not in names):
            continue
        if value is True:
            words.append(flag(field.name))
        else:
            words += [f"{flag(field.name)}={item}" for item in (value if isinstance(value, tuple) else (value,))]
    return words


def is_default_time(spec: RunSpec, word: str) -> bool:
    """Whether a flag is the --time that submit has chosen: another partition has another default."""
    return spec.has_default_time and word.startswith("--time=")


def named_run(arguments: Sequence[str], switches: Mapping[str, bool]) -> str | None:
    """The first argument that is neither a flag nor the value of one; None if there is none.

    `switches` are the flags without dashes; True for those that take no value.
    """
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            return word
        name = word.lstrip("-").replace("_", "-")
        takes_value = "=" not in word and not switches.get(name, name.startswith("no-") or name in {"h", "help"})
        if takes_value:
            next(words, None)
    return None


def with_own_flags(own: Sequence[str], arguments: Sequence[str], switches: Mapping[str, bool]) -> list[str]:
    """The flags that a run has, without those that the user has typed, and then these.

    A flag that is given several times, such as --setup, replaces all that the run has. `--no-NAME` takes a switch back;
    `switches` as in `named_run`.
    """
    off = {f"--no-{name}" for name, is_switch in switches.items() if is_switch}
    typed = typed_names(arguments)
    kept = [word for word in own if word[2:].partition("=")[0] not in typed]
    return [*kept, *(word for word in arguments if word not in off)]
