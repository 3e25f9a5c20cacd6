"""The command that submits a run once more, from its spec. Pure; runs on the login node."""

import shlex
from dataclasses import fields
from typing import Any

from hpc.spec import Recovery, Resources, RunSpec
from training.config.rules import flag
from training.config.train_config import TrainConfig


def submit_command(spec: RunSpec) -> list[str]:
    """The words to type: every setting that is not the default, those that submit has chosen among them."""
    owners: list[tuple[Any, Any]] = [(spec.resources, Resources()), (spec.recovery, Recovery())]
    if spec.train is not None:
        synthetic = spec.train.synthetic
        owners.append((spec.train, TrainConfig(data=spec.train.data, synthetic=synthetic)))
    data = spec.train.data if spec.train is not None else spec.data
    flags = [f"--cluster={spec.cluster}", *([f"--data={data}"] if data else [])]
    flags += [word for owner, default in owners for word in _changed(owner, default)]
    flags += ["--synthetic"] if spec.train is not None and spec.train.synthetic else []
    flags += [f"--stage-dir={spec.stage_dir}"] if spec.stage_dir != "/tmp" else []  # noqa: S108 - submit's default
    flags += [f"--stage-keep={spec.stage_keep}"] if spec.stage_keep != "7d" else []
    flags += [] if spec.pack is None else ["--pack=on", f"--pack-size={spec.pack}"]
    flags += ["--stage-env"] if spec.stage_env else []
    script = ["--", *spec.script] if spec.script else []
    return ["python", "-m", "hpc.submit", *flags, *script]


def _changed(owner: Any, default: Any) -> list[str]:
    values = {field.name: getattr(owner, field.name) for field in fields(owner)}
    return [word for name, value in values.items() if value != getattr(default, name) for word in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name)] if value else []
    return [f"{flag(name)}={item}" for item in (value if isinstance(value, tuple) else (value,))]


def for_people(command: list[str]) -> str:
    """The same for a shell, a flag a line."""
    first, *rest = [shlex.quote(word) for word in command[3:]] or [""]
    head = f"{' '.join(command[:3])} {first}".rstrip()
    return " \\\n  ".join([head, *_with_script_on_one_line(rest)])


def _with_script_on_one_line(words: list[str]) -> list[str]:
    if "--" not in words:
        return words
    start = words.index("--")
    return [*words[:start], " ".join(words[start:])]
