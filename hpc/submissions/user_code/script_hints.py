"""Tells the user, from the script's text, what would go wrong without an error. Runs on the login node.

A false alarm is worse than silence: an import that nobody here knows may do what the script seems to lack.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from hpc.base.environment import SNAPSHOTS
from hpc.run.spec import RunSpec, program_of
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
_OLD_HYDRA = ("1.0", "1.1")
_MOST_FILES, _MOST_BYTES = 200, 2**16


def hints(code: UserCode, spec: RunSpec) -> list[str]:
    """Return a sentence for each thing in the script's text that would waste the run, with what to type instead."""
    trees = code.text.trees
    if not trees:
        return []
    words = _words(trees.values())
    name, ranks = program_of(code.script), spec.resources.nodes.most * spec.resources.ranks_per_node
    found = []
    # Each copy of our library has this name, and no other code.
    if copy := next((path for path, tree in trees.items() if SNAPSHOTS in _words([tree])), None):
        found.append(
            f"{name} imports {os.path.relpath(copy, code.root)}, a copy of torchrelay that may be of another version: "
            "remove it, and use `from torchrelay import ...`, which works in every rank"
        )
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


# --- Hydra ---


def _moves_hydra(trees: Mapping[Path, ast.Module], script: tuple[str, ...], words: set[str]) -> bool:
    """Return whether Hydra gives the script a new directory at each start, and the script uses it."""
    arguments = [word.lstrip("+") for word in script[1:]]
    if any(word.startswith(("hydra.run.dir=", "hydra=")) or word in {"-m", "--multirun"} for word in arguments):
        return False
    mains = ((path, decorator) for path, tree in trees.items() for decorator in _decorators(tree))
    path, decorator = next(mains, (None, None))
    if path is None or decorator is None:
        return False
    files = list(_configurations(path, decorator))
    settings = [one.get("hydra") or {} for one in files]
    places = [place for one in settings if (place := (one.get("run") or {}).get("dir"))]
    if any("${now" not in str(place) for place in places):
        return False
    chdir = [one["job"]["chdir"] for one in settings if "chdir" in (one.get("job") or {})]
    chdir += [word.lower().endswith("=true") for word in arguments if word.startswith("hydra.job.chdir=")]
    uses = any("output_dir" in text for text in (*words, *map(str, files)))
    return uses or bool(chdir[-1] if chdir else _is_old(decorator))


def _decorators(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(called) == "hydra.main":
                yield decorator


def _argument(decorator: ast.expr, name: str) -> object:
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    constants = {each.arg: each.value.value for each in keywords if isinstance(each.value, ast.Constant)}
    return constants.get(name, ...)


def _is_old(decorator: ast.expr) -> bool:
    """Return whether Hydra behaves as its version 1.1, which changes the working directory."""
    version = _argument(decorator, "version_base")
    return version is ... or version in _OLD_HYDRA


def _configurations(file: Path, decorator: ast.expr) -> Iterator[dict[str, Any]]:
    """Yield the content of the YAML files from which Hydra composes the configuration."""
    directory = _argument(decorator, "config_path")
    if not isinstance(directory, str):
        return
    for path in islice(sorted((file.parent / directory).rglob("*.yaml")), _MOST_FILES):
        if path.stat().st_size <= _MOST_BYTES and isinstance(content := _content(path), dict):
            # The files of the group `hydra` set what others set below the key `hydra`.
            yield {"hydra": content} if path.parent.name == "hydra" else content


def _content(path: Path) -> object:
    import yaml  # noqa: PLC0415 - only scripts with Hydra need it

    try:
        return yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError):
        return None  # Hydra will say so
