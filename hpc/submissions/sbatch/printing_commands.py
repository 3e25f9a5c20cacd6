"""Tells commands that only print something from those that write files or set variables. Pure."""

import ast
import re
from collections.abc import Sequence

from hpc.base.errors import UserError

STRICT = r"set(\s+([-+][beEhmTuvx]*o?|errexit|errtrace|functrace|nounset|pipefail|verbose|xtrace))*\s*(\d?>|$)"
"""`set` with options for errors and traces, which mean nothing here: each line of --setup must succeed anyway."""
SETS_DEFAULT = re.compile(r"\$\{(\w+):?=")
"""An expansion that sets a variable: ${NAME:=VALUE}."""
# Commands that only print something, or that have no meaning for a run.
_PRINTS = re.compile(
    r"(:|awk|cat|cut|date|df|du|echo|free|grep|head|hostname|ibstat|id|ip|ls|lscpu|nproc|nvcc (-V|--version)|"
    r"nvidia-smi|printenv|printf|ps|pwd|rocm-smi|sacct|scontrol( -\S+)* show|sed|seff|sleep|sort|squeue|sstat|tail|tr|"
    rf"true|type|uname|uniq|uptime|wait|wc|which|whoami)(\s|$)|python[\d.]* (-V|--version)|env$|{STRICT}|$"
)
# Forms of these commands that write a file or set a variable.
_PRINTS_NOT = re.compile(
    r"\b(awk\s.*(>|\||system|-i\s)|nvidia-smi\b.*\s(-f|--filename)|printf\s+-v|sed\b.*(\s--?\w*i|/\w*w\s)|"
    rf"sort\b.*\s--?\w*o|uniq(\s+-\S+)*(\s+[^-\s]\S*){{2}})|{SETS_DEFAULT.pattern}",
    re.DOTALL,
)
# What the code of `python -c` may call.
_SAYS = re.compile(
    r"print|len|range|str|torch\.(\w+\.)*(is_\w+|get_\w+|version|show|device_count)|platform\.\w+|socket\.gethostname|"
    r"os\.(getcwd|getenv|cpu_count|environ\.get)"
)
_WRITES = re.compile(r"(\d*|&)>(?!&[\d-]|[>&|]?\s*/dev/(null|std(err|out))$)")
_SHOWN = 60  # characters of a line in a message


def only_prints(words: Sequence[str], text: str, redirects: Sequence[str]) -> bool:
    """Return whether the words of a command, whose whole text is given, only print something.

    Raises:
        UserError: the command prints into a file, or sets a variable.
    """
    is_python = len(words) == 3 and re.fullmatch(r"python[\d.]*", words[0]) and words[1] == "-c"
    if not (_only_asks(words[2]) if is_python else _PRINTS.match(" ".join(words))):
        return False
    if any(map(_WRITES.match, redirects)) or _PRINTS_NOT.search(text):
        raise writes(text)
    return True


def _only_asks(code: str) -> bool:
    """Return whether Python code prints values of the modules that it imports, and does nothing else."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    nodes = list(ast.walk(tree))
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    statements = [line for line in tree.body if not isinstance(line, ast.Import | ast.ImportFrom)]
    # A module whose values nobody prints is imported for what its code does.
    return (
        all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Call) for line in statements)
        and all(map(_SAYS.fullmatch, calls))
        and bool(statements)
        and imported <= used
    )


def writes(text: str) -> UserError:
    """Return an error about a command that prints, and whose output or variable the training may need."""
    return UserError(
        f"{short(text)} writes a file or sets a variable: type the line as --setup if the training needs this, and "
        "delete it here"
    )


def short(text: str) -> str:
    """Return a line of the script, or its beginning, for a message."""
    line = " ".join(text.split())
    return f"`{line}`" if len(line) <= _SHOWN else f"`{line[: _SHOWN - 3]}...`"
