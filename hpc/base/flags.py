"""Describes the fields of dataclasses that are flags of a command line.

Imports nothing else: node agents load dataclasses of flags, too, and start sooner without the parser.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What a command line knows of a field besides its type: `Annotated[str, Flag(metavar="NAME")]`."""

    metavar: str = ""
    """What the help calls the value. If it is empty, the type decides, or the field's name if it is positional."""
    letter: str = ""
    """The short form of the flag, such as `-N`."""
    help: str = ""
    """The help text. If it is empty, the docstring of the field is used."""
    is_positional: bool = False
    """Whether the value is typed without the name of the flag."""
    is_repeatable: bool = False
    """Whether the flag may be typed several times; the field is a tuple."""
    is_internal: bool = False
    """Whether the field is no flag: the program sets it."""


POSITIONAL = Flag(is_positional=True)
REPEATABLE = Flag(is_repeatable=True)
INTERNAL = Flag(is_internal=True)
