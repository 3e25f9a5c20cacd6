"""The house rules that a machine can check. Who may import whom: import-linter's contracts in pyproject.toml."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hpc.__main__ import VERBS

ROOT = Path(__file__).parents[1]
PACKAGES = [ROOT / "hpc", ROOT / "jobs", ROOT / "training"]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
FOLDERS = [*PACKAGES, *(path for package in PACKAGES for path in package.rglob("*") if (path / "__init__.py").exists())]
# Names that mean the same wherever they stand: a verb's entry point; a node's part in staging, and in doctor; flags.
SAME_EVERYWHERE = {"__main__", "staging", "doctor", "config"}
# The verbs in hpc/ are not counted either: `hpc` lists them.
MOST_ENTRIES, UNCOUNTED = 17, {"__init__.py", "__pycache__"}
HEAVY = {"torch", "torchvision", "pandas", "bokeh"}


def repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_public_class_names_are_unique() -> None:
    nodes = [node for path in MODULES for node in ast.walk(ast.parse(path.read_text()))]
    assert not repeated([node.name for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_"])


def test_names_of_modules_and_packages_are_unique() -> None:
    modules = [path.stem for path in MODULES if path.stem != "__init__"]
    assert not repeated([*modules, *(path.name for path in FOLDERS)]) - SAME_EVERYWHERE


def test_names_of_test_modules_are_unique() -> None:
    # pytest imports them by their names alone.
    assert not repeated([path.name for path in (ROOT / "tests").rglob("test_*.py")])


def test_folders_show_few_entries() -> None:
    verbs = {ROOT / "hpc" / name for verb in VERBS for name in (verb, f"{verb}.py")}
    entries = {
        folder: [path.name for path in folder.iterdir() if path.name not in UNCOUNTED and path not in verbs]
        for folder in FOLDERS
    }
    assert not {str(folder): names for folder, names in entries.items() if len(names) > MOST_ENTRIES}


def test_modules_have_docstrings() -> None:
    assert not [path for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_training_knows_nothing_of_slurm() -> None:
    assert not [path for path in (ROOT / "training").rglob("*.py") if "SLURM_" in path.read_text()]


@pytest.mark.parametrize(
    "module",
    [f"hpc.{verb}.__main__" for verb in VERBS if verb != "report" and (ROOT / "hpc" / verb).is_dir()]
    + [f"hpc.{verb}" for verb in VERBS if (ROOT / "hpc" / f"{verb}.py").exists()]
    + ["hpc.__main__", "hpc.report", "jobs.agent", "jobs.ranks.usage"],
)
def test_import_loads_neither_torch_nor_pandas(module: str) -> None:
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lock_file_names_no_index() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "--hash=sha256:" in lock
    assert "://" not in lock
    assert "index-url" not in lock
