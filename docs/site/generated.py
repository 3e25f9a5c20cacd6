"""Writes what is made from the code: docs/json.schema.json, and pages on commands and flags, JSON documents, events."""

import importlib
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import msgspec

from docs.site import json_schema
from hpc.__main__ import PROGRAMS, VERBS, module_of
from hpc.base import program
from hpc.programs.program_flags import ProgramFlags
from hpc.programs.program_kinds import DEFAULT
from hpc.programs.script_flags import ScriptFlags
from hpc.run.events import kinds
from hpc.submissions.options import submit_flags, with_program

# A command with so many flags of hpc submit takes a submission's.
_MANY = 10
# The modules and classes of the programs' flags. The class of a command's flags is named after the command.
_OF_PROGRAMS = {
    "train": "training.config.command_line:TrainOptions", "pack": "training.pack.__main__:PackOptions",
    "predict": "training.inference.predict:PredictOptions", "export": "training.inference.export:ExportOptions",
    "profile": "training.profile:ProfileOptions", "verify": "training.verify_resume.__main__:VerifyOptions",
}  # fmt: skip
NOTE = "<!-- Made by docs/site/generated.py: changes are overwritten. -->\n"


def write_pages(directory: Path) -> None:
    """Write docs/json.schema.json, commands.md, json.md and events.md."""
    json_schema.FILE.write_text(json_schema.schema_text())
    schema = json.loads(json_schema.FILE.read_text())
    for name, text in (("commands", commands_page()), ("json", json_page(schema)), ("events", events_page())):
        (directory / f"{name}.md").write_text(f"{NOTE}{text}")


def commands_page() -> str:
    """Every command, with its flags, their defaults and texts."""
    summaries = VERBS | {name: summary for name, (_, summary) in PROGRAMS.items()}
    parts = [
        "# Commands and flags\n",
        "Every command also has `--help`, `--debug` for tracebacks and, if it prints results, `--json`.\n",
    ]
    for name, summary in summaries.items():
        parts.append(f"## hpc {name}\n\n{summary[0].upper()}{summary[1:]}.\n")
        parts += _sections(name)
    return "\n".join(parts)


def options_of(command: str) -> type[Any]:
    """Return the dataclass of a command's flags, with those of the default program if it submits any."""
    own = f"{module_of(command)}:{command.capitalize()}Options" if command in VERBS else _OF_PROGRAMS[command]
    module, _, name = own.partition(":")
    options: type[Any] = getattr(importlib.import_module(module), name)
    takes_any = any(field.type is ProgramFlags for field in fields(options))
    return with_program(options, DEFAULT) if takes_any else options


def _sections(name: str) -> Iterator[str]:
    options = options_of(name)
    text, _, examples = inspect.cleandoc(options.__doc__ or "").partition("\n\nFor example:\n")
    yield f"{text}\n"
    commands, _, rest = examples.partition("\n\n")
    if commands:
        yield f"For example:\n\n```bash\n{textwrap.dedent(commands)}\n```\n\n{rest}\n"
    yield _table(options)
    if name == "submit":
        yield "### With your own script\n\nAfter `--`, a script with its arguments replaces the image classifier.\n"
        yield _table(ScriptFlags)


def _table(options: type[Any]) -> str:
    texts, rows = program.flag_texts(options), list[str]()
    fields = [field for field in program.offered(options) if field.name not in {"json", "debug", "help_all"}]
    of_submit = {field.name for field in program.flags(submit_flags())} & {field.name for field in fields}
    if options is submit_flags() or len(of_submit) < _MANY:
        of_submit = set()
    for field in fields:
        if field.name not in of_submit:
            default = f"`{text}`" if (text := program.default_text(field)) else ""
            text = " ".join(texts.get(field.name, "").split()).replace("|", "\\|")
            rows.append(f"| `{_typed(field)}` | {default} | {text} |")
    lines = ["| flag | default | meaning |", "|---|---|---|", *rows, ""] if rows else []
    shared = [f"`{_typed(field)}`" for field in fields if field.name in of_submit]
    if shared:
        lines += [f"Like [hpc submit](#hpc-submit), it also has {', '.join(shared)}.", ""]
    return "\n".join(lines)


def _typed(field: Field[Any]) -> str:
    """How a flag, or a positional argument, is typed."""
    return field.name.upper() if program.mark_of(field).is_positional else f"--{program.flag_name(field)}"


def json_page(schema: dict[str, Any]) -> str:
    """Every document of --json, with its fields."""
    parts = [
        "# JSON documents\n",
        f"{schema['description']}\n\nThe schema itself is `docs/json.schema.json`.\n",
    ]
    for name, definition in schema["$defs"].items():
        parts.append(f"## {name}\n\n{definition.get('description', '')}\n")
        fields = definition.get("properties") or definition.get("items", {}).get("properties") or {}
        rows = [f"| `{field}` | {_kind(about)} | {about.get('description', '')} |" for field, about in fields.items()]
        parts.append(
            "\n".join(["| field | type | |", "|---|---|---|", *rows, ""]) if rows else f"{_kind(definition)}\n"
        )
    return "\n".join(parts)


def _kind(about: dict[str, Any]) -> str:
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "enum" in about:
        return " or ".join(f"`{value}`" for value in about["enum"])
    if "const" in about:
        return f"`{about['const']}`"
    for word, parts in (("array", about.get("items")), ("object", about.get("additionalProperties"))):
        if isinstance(parts, dict):
            return f"{word} of {_kind(parts)}"
    if several := about.get("anyOf"):
        return " or ".join(map(_kind, several))
    kinds = about.get("type", "any")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def events_page() -> str:
    """Every event of the ledger."""
    rows = [f"| {kind.__struct_config__.tag} | {_text_of(kind)} | {_fields_of(kind)} |" for kind in kinds.KINDS]
    return "\n".join([_EVENTS, "| event | what has happened | fields |", "|---|---|---|", *rows, ""])


_EVENTS = """# Events

Each line of `events/*.jsonl` in a run directory is one event, a JSON object. It has the name of its kind in `event`, a
`time`, and `attempt`, if it belongs to one. Times are seconds since the epoch. A value that is not known is
null or absent. Fields in italics may be absent.
"""


def _text_of(kind: type[kinds.Event]) -> str:
    """Return the texts of an event's class and of the classes between it and `Event`."""
    classes = kind.__mro__[: kind.__mro__.index(kinds.Event)]
    return " ".join(" ".join((each.__doc__ or "").split()) for each in reversed(classes))


def _fields_of(kind: type[kinds.Event]) -> str:
    own = [field for field in msgspec.structs.fields(kind) if field.name not in {"time", "attempt"}]
    return ", ".join(field.name if field.required else f"*{field.name}*" for field in own)
