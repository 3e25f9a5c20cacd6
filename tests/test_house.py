"""The house rules that a machine can check. Who may import whom: import-linter's contracts in pyproject.toml."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from hpc.__main__ import VERBS, module_of

ROOT = Path(__file__).parents[1]
COMMANDS = ROOT / "hpc" / "commands"
PACKAGES = [ROOT / "hpc", ROOT / "jobs", ROOT / "training"]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
FOLDERS = [*PACKAGES, *(path for package in PACKAGES for path in package.rglob("*") if (path / "__init__.py").exists())]
# Names that mean the same wherever they stand: a verb's entry point; a node's part in staging; flags; private names
# of other libraries.
SAME_EVERYWHERE = {"__main__", "staging", "config", "compat"}
# What one `ls` shows. That of hpc tells commands from libraries at a glance.
MOST_ENTRIES = 16
HEAVY = {"torch", "torchvision", "pandas", "bokeh"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_public_class_names_are_unique() -> None:
    nodes = [node for path in MODULES for node in ast.walk(tree(path))]
    assert not repeated([node.name for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_"])


def test_names_of_modules_and_packages_are_unique() -> None:
    # A command has the name that users type, which may be its room's.
    named = [path for path in (*MODULES, *FOLDERS) if path.stem != "__init__" and COMMANDS not in path.parents]
    assert not repeated([path.stem for path in named]) - SAME_EVERYWHERE


def test_names_of_test_modules_are_unique() -> None:
    # pytest imports them by their names alone.
    assert not repeated([path.name for path in (ROOT / "tests").rglob("test_*.py")])


def is_named_after_what_it_tests(test: Path) -> bool:
    """Whether a test file of a room has the name of one of its modules or of the room, and perhaps an aspect."""
    room = test.parent.relative_to(ROOT / "tests")
    modules = {path.stem.strip("_") for path in (ROOT / room).iterdir()}
    name = test.stem.removeprefix("test_")
    return any(name == known or name.startswith(f"{known}_") for known in {*modules, room.name})


def test_tests_stand_in_the_room_of_the_module_that_they_are_named_after() -> None:
    rooms = [ROOT / "tests" / package for package in ("hpc", "jobs", "training", "benchmarks")]
    tests = [path for room in rooms for path in room.rglob("test_*.py")]
    assert not {path.parent for path in tests if not (ROOT / path.parent.relative_to(ROOT / "tests")).is_dir()}
    assert not [path for path in tests if not is_named_after_what_it_tests(path)]


def is_shown(path: Path) -> bool:
    """Whether it is more than the bytecode of modules, which may have been moved."""
    shown = path.iterdir() if path.is_dir() else [path]
    return path.name != "__pycache__" and any(below.name != "__pycache__" for below in shown)


def test_folders_show_few_entries() -> None:
    entries = {folder: [path.name for path in folder.iterdir() if is_shown(path)] for folder in FOLDERS}
    assert not {str(folder): names for folder, names in entries.items() if len(names) > MOST_ENTRIES}


def test_modules_have_docstrings() -> None:
    helpers = (ROOT / "tests" / "support").glob("*.py")
    assert not [path for path in (*MODULES, *helpers) if not ast.get_docstring(tree(path))]


def private_imports(path: Path) -> list[str]:
    """Imports from private modules, and of private names."""
    found = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in found for alias in node.names if node.module != "__future__"]
    return [name for name in names if "._" in name.replace("__main__", "main")]


def test_private_names_of_other_libraries_are_in_compat_alone() -> None:
    others = [path for path in MODULES if path.name != "compat.py"]
    assert not {path: found for path in others if (found := private_imports(path))}
    assert not [path for path in others if "noqa: SLF001" in path.read_text()]


def test_training_knows_nothing_of_slurm() -> None:
    assert not [path for path in (ROOT / "training").rglob("*.py") if "SLURM_" in path.read_text()]


def test_no_verb_imports_torch_or_pandas_when_it_starts() -> None:
    verbs = [module_of(verb) for verb in VERBS if verb != "report"]
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        f"    assert not set(sys.modules) & {HEAVY!r}, module"
    )
    modules = [*verbs, "hpc.__main__", "hpc.report", "jobs.agent"]
    done = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_lock_file_names_no_index() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "--hash=sha256:" in lock
    assert "://" not in lock
    assert "index-url" not in lock
