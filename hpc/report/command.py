"""A run's settings, and the command that submits it once more. Pure; runs on the login node."""

import shlex
from dataclasses import asdict
from typing import Any

from hpc.flags import flags_of
from hpc.spec import RunSpec


def submit_command(spec: RunSpec) -> list[str]:
    """The arguments to type: every setting that is not the default, also those that submit has chosen."""
    script = ["--", *spec.script] if spec.script else []
    return ["python", "-m", "hpc.submit", *flags_of(spec), *script]


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
