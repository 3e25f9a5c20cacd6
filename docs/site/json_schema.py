"""Makes docs/json.schema.json, which describes the documents of `hpc VERB --json`. `make docs` writes the file."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from docs.site.json_documents import DOCUMENTS
from hpc.base import program

FILE = Path(__file__).parents[1] / "json.schema.json"
_REFERENCE, _WIDTH = "#/$defs/", 120
_NAMES = {"Summary": "run", "AttemptSummary": "attempt"} | {
    kind.__name__: verb for verb, kind in DOCUMENTS.items() if not get_args(kind)
}


def schema_text() -> str:
    """Return the text of docs/json.schema.json."""
    return f"{_layout(_schema())}\n"


def _schema() -> dict[str, Any]:
    """Return the schema: the document of each verb, then the parts of which they consist."""
    documents = {kind.__name__: kind for document in DOCUMENTS.values() for kind in _classes(document)}
    _, parts = msgspec.json.schema_components(
        documents.values(),
        schema_hook=lambda _: {"type": "string"},  # Path
        ref_template=f"{_REFERENCE}{{name}}",
    )
    nested = set(re.findall(rf"{re.escape(_REFERENCE)}(\w+)", json.dumps(parts)))
    for name, kind in _with_parts(documents.values()).items():
        parts[name] = _object(kind, parts[name])
        if name in documents:
            parts[name]["properties"] = {"schema": {"const": program.SCHEMA}, **parts[name]["properties"]}
            parts[name]["required"] = [*([] if name in nested else ["schema"]), *parts[name]["required"]]
    definitions = {verb: _reference(document) for verb, document in DOCUMENTS.items()}
    definitions |= {_name(name): part for name, part in parts.items()}
    text = re.sub(rf"(?<={re.escape(_REFERENCE)})\w+", lambda found: _name(found[0]), json.dumps(definitions))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpc VERB --json",
        "description": f"The document of each verb is in $defs. Version {program.SCHEMA}.",
        "$defs": json.loads(text, object_hook=_merged),
    }


def _classes(kind: Any) -> Iterator[type[Any]]:
    """Yield the classes that a type names."""
    parts = get_args(kind)
    if not parts and isinstance(kind, type):
        yield kind
    for part in parts:
        yield from _classes(part)


def _with_parts(kinds: Iterable[type[Any]]) -> dict[str, type[Any]]:
    """Return the classes with fields among some classes and among the types of their fields, by name."""
    found = dict[str, type[Any]]()
    for kind in kinds:
        if hints := get_type_hints(kind):
            named = (part for hint in hints.values() for part in _classes(hint))
            found |= {kind.__name__: kind, **_with_parts(named)}
    return found


def _object(kind: type[Any], part: dict[str, Any]) -> dict[str, Any]:
    """Complete what msgspec makes of a class: no other fields, all that must be there, and their texts."""
    # A class that was made by a call has no source; its types have the texts.
    texts = program.field_texts(kind) if kind.__doc__ else {}
    properties = {}
    for name in get_type_hints(kind):
        properties[name] = {key: value for key, value in part["properties"][name].items() if key != "default"}
        if name in texts:
            properties[name]["description"] = _text(texts[name])
    return {
        **({"description": _text(kind.__doc__)} if kind.__doc__ else {}),
        "type": "object",
        "properties": properties,
        # Fields with defaults are always written.
        "required": [name for name in properties if not is_typeddict(kind) or name in kind.__required_keys__],
        "additionalProperties": False,
    }


def _text(docstring: str) -> str:
    return re.sub(r"\bNone\b", "null", " ".join(docstring.split()))


def _reference(document: Any) -> dict[str, Any]:
    """Return the schema of a class, an array or alternatives, which msgspec does not have of classes without tags."""
    parts = [_reference(part) for part in get_args(document)]
    if get_origin(document) is list:
        return {"type": "array", "items": parts[0]}
    return {"anyOf": parts} if parts else {"$ref": f"{_REFERENCE}{document.__name__}"}


def _merged(part: dict[str, Any]) -> dict[str, Any]:
    """Join alternatives that are plain types, such as number and null, to one list of types."""
    several = part.get("anyOf", [])
    if not several or any(one.keys() != {"type"} for one in several):
        return part
    return {"type": [one["type"] for one in several], **{key: part[key] for key in part if key != "anyOf"}}


def _layout(value: Any, indent: int = 0) -> str:
    """Write a value on one line if it fits, else each of its parts from a line of its own."""
    text = json.dumps(value)
    if indent + len(text) < _WIDTH or isinstance(value, str):
        return text
    inner = indent + 2
    parts = (
        [f"{json.dumps(key)}: {_layout(part, inner)}" for key, part in value.items()]
        if isinstance(value, dict)
        else [_layout(part, inner) for part in value]
    )
    lines = f",\n{' ' * inner}".join(parts)
    return f"{text[0]}\n{' ' * inner}{lines}\n{' ' * indent}{text[-1]}"


def _name(name: str) -> str:
    """Return the name of a class in the schema."""
    return _NAMES.get(name) or re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
