"""The house rules that a machine can check: who imports whom, and what a submission costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "torchvision", "pandas", "matplotlib"}
# package: what its modules may never import, and what they may not import at import time.
NEVER = {"training": {"jobs", "submitit"}, "jobs": {"torch", "torchvision", "pandas"}, "hpc": {"jobs"}}
NOT_AT_IMPORT = {"hpc": HEAVY, "jobs": HEAVY, "training": set()}
# The only places that may import them at once: they are imported when the verb is typed.
DRAWS = ROOT / "hpc" / "report"
MODULES = sorted(path for package in NEVER for path in (ROOT / package).rglob("*.py"))


def imported(nodes: list[ast.stmt]) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_keeps_to_the_import_rules(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text())
    everywhere = imported([node for node in ast.walk(tree) if isinstance(node, ast.stmt)])
    assert not tops(everywhere) & NEVER[package]
    allowed = {"pandas", "matplotlib"} if path.is_relative_to(DRAWS) else set()
    assert not tops(imported(tree.body)) & (NOT_AT_IMPORT[package] - allowed)
    if package == "hpc":
        of_training = {name for name in everywhere if name.split(".")[0] == "training"}
        assert all(name.startswith("training.config.train_config") for name in of_training), (
            "only the torch-free configuration"
        )
    if package == "training":
        assert "SLURM_" not in path.read_text(), "the trainer knows nothing of Slurm"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "module",
    ["hpc.submit", "hpc.status", "hpc.logs", "hpc.cancel", "hpc.doctor", "hpc.supervise", "hpc.__main__", "hpc.report",
     "jobs.agent"],
)  # fmt: skip
def test_import_loads_neither_torch_nor_pandas(module: str) -> None:
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lock_file_names_no_index() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "--hash=sha256:" in lock
    assert "://" not in lock
    assert "index-url" not in lock
