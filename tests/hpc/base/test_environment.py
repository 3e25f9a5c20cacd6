"""The contract of the environment variables: each has one name, and this module has all of them."""

import ast
import re
from pathlib import Path

from support.cluster import ROOT

from hpc.base import environment

RELAY = sorted((ROOT / "training" / "relay" / "torchrelay").glob("*.py"))


def names_in(path: Path) -> set[str]:
    """Whole names, not sentences that mention them."""
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if re.fullmatch("TORCHRELAY_[A-Z_]*", text)}


def test_each_variable_is_named_in_the_contract_alone() -> None:
    own = {*RELAY, ROOT / "hpc" / "base" / "environment.py"}
    found = {path: names_in(path) for room in ("hpc", "jobs", "training") for path in (ROOT / room).rglob("*.py")}
    assert not {path for path, names in found.items() if names and path not in own}, (
        "import it from hpc.base.environment"
    )


def test_the_library_of_the_ranks_has_the_names_of_the_contract() -> None:
    assert set().union(*map(names_in, RELAY)) == {
        environment.RUN_DIR, environment.ATTEMPT, environment.NEXT_CLAIM, environment.HEARTBEAT, environment.SNAPSHOTS,
        environment.STOP_SIGNAL, environment.PROTOCOL,
    }  # fmt: skip
