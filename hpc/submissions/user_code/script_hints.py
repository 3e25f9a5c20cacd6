"""Tells the user what a run has of the user's directory, and what would go wrong without an error. Login node.

A false alarm is worse than silence: an import that nobody here knows may do what the script seems to lack.
"""

import ast
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from pathlib import Path

from hpc.base.text import few, visible
from hpc.run.spec import RunSpec, program_of
from hpc.submissions.checks import is_node_local
from hpc.submissions.user_code.code_layout import scan
from hpc.submissions.user_code.own_code import UserCode
from hpc.submissions.user_code.script_imports import ScriptText

# Packages that join no ranks.
_KNOWN = frozenset({
    "PIL", "PyQt5", "cv2", "einops", "h5py", "imageio", "matplotlib", "numpy", "omegaconf", "hydra", "pandas", "psutil",
    "pydantic", "regex", "relay", "requests", "rich", "safetensors", "scipy", "seaborn", "skimage", "sklearn",
    "tensorboard", "tiktoken", "torch", "torchaudio", "torchinfo", "torchmetrics", "torchrelay", "torchvision", "tqdm",
    "tyro", "wandb", "yaml",
})  # fmt: skip
# Words of a script that joins its ranks, or that divides its work between them by itself.
_JOINS = frozenset(
    {"distributed", "device_mesh", "init_device_mesh", "RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID"}
)
# Modules and functions whose effect is unknown.
_UNKNOWN = frozenset({"importlib", "runpy", "subprocess", "__import__", "exec", "eval", "system"})
_MOST_FILES, _MOST_BYTES = 200, 2**16
_MOST_IN_DIRECTORY, _MOST_ENTRIES = 1000, 10_000
_OWNERSHIP = "dubious ownership"


def code_line(code: UserCode) -> list[str]:
    """Return a sentence about what a run copies and links; none if it does neither."""
    copies, links = code.layout.copies, code.layout.links
    if code.in_place or not (copies or links):
        return []
    rest = f", and links to the rest: {few(links)}" if links else ""
    return [visible(f"it has a copy of {len(copies)} file{'s' * (len(copies) != 1)} of {code.root}{rest}")]


def warnings_of_code(code: UserCode, *, on_cluster: bool) -> list[str]:
    """Return warnings about what an edit would change, and about links that the nodes cannot follow."""
    found = [
        f"{code.root / name} has too many entries for a copy of the code in it: an edit there changes the run"
        for name in code.layout.crowded
    ]
    if code.git_problem:
        advice = f"; type git config --global --add safe.directory {code.top}" if _OWNERSHIP in code.git_problem else ""
        found.append(
            f"git does not say which files of {code.top} it tracks ({code.git_problem}), so only small sources and "
            f"configurations are copied, and the rest is linked{advice}"
        )
    if on_cluster and code.layout.links and is_node_local(code.root):
        found.append(f"{code.root} is on this machine's own disk, so the nodes cannot read what is not copied")
    return found


def hints(code: UserCode, spec: RunSpec) -> list[str]:
    """Return a sentence for each thing in the script's text that would waste the run, with what to type instead."""
    try:
        return _hints(code, spec) if code.text.trees else []
    except (OSError, RecursionError):  # a directory cannot be read, or an expression is too long for ast.unparse
        return []


def _hints(code: UserCode, spec: RunSpec) -> list[str]:
    trees = code.text.trees
    words = _words(trees.values())
    name, ranks = program_of(code.script), spec.resources.nodes.most * spec.resources.ranks_per_node
    found = []
    if _moves_hydra(trees, code.script, words):
        found.append(
            f"{name} uses Hydra, which makes a new directory at each start, so that a restart would not find what the "
            "start before has saved: add 'hydra.run.dir={run_dir}/hydra' to its arguments"
        )
    if ranks > 1 and _spawns(trees.values()) and not words & _JOINS - {"distributed"}:
        found.append(
            f"{name} starts processes with mp.spawn, but is itself started {ranks} times, once for each rank: call its "
            "function directly, with int(os.environ['LOCAL_RANK']) in place of the index"
        )
    elif ranks > 1 and _trains_alone(code.text, words):
        single = "--nodes 1" + (" --gpus-per-node 1" if spec.resources.ranks_per_node > 1 else "")
        found.append(
            f"{name} does not join its {ranks} ranks (it never calls init_process_group), so each would train the same "
            f"model alone: use {single}, or DistributedDataParallel (docs/how-to/own-script.md)"
        )
    return found


def _words(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names, attributes and texts in files, and the parts of the modules' names that they import."""
    found = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                found.add(word)
            case ast.Import(names=names):
                found.update(part for alias in names for part in alias.name.split("."))
            case ast.ImportFrom(module=module, names=names):
                found.update((module or "").split("."), (alias.name for alias in names))
    return found


def _spawns(trees: Iterable[ast.Module]) -> bool:
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(ast.unparse(call).endswith(("mp.spawn", "multiprocessing.spawn")) for call in calls)


def _trains_alone(text: ScriptText, words: set[str]) -> bool:
    """Return whether the ranks surely train without each other: every import is known, and nothing joins them."""
    if "torch" not in words or "backward" not in words or words & (_JOINS | _UNKNOWN):
        return False
    return text.installed <= _KNOWN | sys.stdlib_module_names


def _moves_hydra(trees: Mapping[Path, ast.Module], script: tuple[str, ...], words: set[str]) -> bool:
    """Return whether Hydra gives the script a new directory at each start, and the script uses it."""
    arguments = [word.lstrip("+") for word in script[1:]]
    if any(word.startswith(("hydra.run.dir=", "hydra=")) or word in {"-m", "--multirun"} for word in arguments):
        return False
    mains = (
        (path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    )
    decorators = ((path, text) for path, node in mains for text in map(ast.unparse, node.decorator_list))
    path, decorator = next((main for main in decorators if main[1].startswith("hydra.main")), (None, ""))
    if path is None:
        return False
    configuration = "\n".join(_configurations(path, decorator))
    if any("${now" not in place for place in re.findall(r"^\s*run:\s+dir:(.*)", configuration, re.MULTILINE)):
        return False
    chdir = re.findall(
        r"^\s*chdir: *(\w+)|^hydra\.job\.chdir=(\w+)", "\n".join([configuration, *arguments]), re.MULTILINE
    )
    # Hydra 1.1 changes the working directory, and later versions do so if version_base asks for its behaviour.
    changes = (
        "".join(chdir[-1]).lower() == "true" if chdir else not re.search(r"version_base=(None|'1\.[2-9])", decorator)
    )
    return changes or any("output_dir" in text for text in (*words, configuration))


def _configurations(file: Path, decorator: str) -> Iterator[str]:
    """Yield the text of the YAML files from which Hydra composes the configuration, those nearest to its top first."""
    directory = re.search(r"config_path='([^']*)'", decorator)
    for path in islice(_yaml_files(file.parent / directory[1]), _MOST_FILES) if directory else ():
        with suppress(OSError):  # a link without a target, a file that is not readable, or that is no more
            if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                yield path.read_text(errors="replace")


def _yaml_files(top: Path) -> Iterator[Path]:
    """Yield the YAML files in and below a directory, level by level. Data may lie there, too: some is not looked at."""
    waiting, left = deque([top]), _MOST_ENTRIES
    while waiting and left > 0:
        entries = scan(waiting.popleft(), min(left, _MOST_IN_DIRECTORY))
        left -= len(entries)
        for entry in sorted(entries, key=attrgetter("name")):
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif entry.name.endswith(".yaml"):
                yield Path(entry.path)
