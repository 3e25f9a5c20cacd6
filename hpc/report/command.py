"""A run's settings, and the command that submits it once more. Pure; runs on the login node."""

import shlex
from dataclasses import asdict, fields
from typing import Any

from hpc.spec import Network, Recovery, Resources, RunSpec
from training.config.rules import flag
from training.config.train_config import TrainConfig


def submit_command(spec: RunSpec) -> list[str]:
    """The arguments to type: every setting that is not the default, also those that submit has chosen."""
    flags = [f"--cluster={spec.cluster}", *([f"--data={spec.data}"] if spec.data and spec.train is None else [])]
    flags += [*(_changed(spec.train) if spec.train else []), *_changed(spec.resources), *_changed(spec.recovery)]
    flags += _changed(spec.network)
    flags += [f"--stage-dir={spec.stage_dir}"] if spec.stage_dir != "/tmp" else []  # noqa: S108 - submit's default
    flags += [f"--stage-keep={spec.stage_keep}"] if spec.stage_keep != "7d" else []
    flags += [f"--stage-timeout={spec.stage_timeout}"] if spec.stage_timeout != "5m" else []
    flags += [] if spec.pack is None else ["--pack=on", f"--pack-size={spec.pack}"]
    flags += ["--device=cpu"] if spec.device == "cpu" else []
    flags += ["--stage-env"] if spec.stage_env else []
    flags += [f"--python={spec.python}"] if spec.python else []
    flags += [f"--container={spec.container}"] if spec.container else []
    flags += [f"--include={pattern}" for pattern in spec.include] + (["--no-snapshot"] if spec.in_place else [])
    script = ["--", *spec.script] if spec.script else []
    return ["python", "-m", "hpc.submit", *flags, *script]


def _changed(settings: TrainConfig | Resources | Recovery | Network) -> list[str]:
    """The flags of all fields that differ from their defaults; one for each item of a tuple."""
    words = list[str]()
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value == field.default:
            continue
        if value is True:
            words.append(flag(field.name))
        else:
            words += [f"{flag(field.name)}={item}" for item in (value if isinstance(value, tuple) else (value,))]
    return words


def shell_text(command: list[str]) -> str:
    """The command as one types it in a shell, one flag per line, the user's script with its arguments on one."""
    program, words = " ".join(command[:3]), [shlex.quote(word) for word in command[3:]]
    if "--" in words:
        start = words.index("--")
        words = [*words[:start], " ".join(words[start:])]
    return " \\\n  ".join([" ".join([program, *words[:1]]), *words[1:]])


def flat_settings(spec: RunSpec) -> dict[str, str]:
    """Every setting of a run by its flag's name."""
    settings = asdict(spec)
    nested = dict[str, Any]()
    for group in ("resources", "recovery", "network", "train"):
        nested |= settings.pop(group) or {}
    merged = {**settings, **nested, "data": nested.get("data") or settings["data"]}
    found = dict[str, str]()
    for name, value in merged.items():
        words = value if isinstance(value, list | tuple) else [] if value is None else [value]
        found[name.replace("_", "-")] = " ".join(map(str, words))
    return found
