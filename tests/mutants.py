"""Would the tests notice? Changes what decides, one thing at a time, and runs the room's own tests on each change.

    make mutants ROOM=hpc/run/causes.py            or a folder; without ROOM, all that tests/mutants.toml names
    make mutants ROOM=training/checkpoint EVERY=10  each tenth mutant: there, each takes half a minute
    make mutants ROOM=simulated EVERY=10            what decides about recovery, in the simulation instead of the tests

The changes are mutmut's. Its own runner leaves out properties and the tables of a module, which decide here: hence this
one, which also drops entries of tables, calls and conditions. Text for people is not changed. Each mutant is a file in
a copy of the checkout, so that processes which a test starts have it too; its tests run in a fork of a process that has
imported torch and pytest.
"""

import contextlib
import difflib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
import pytest
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators, operator_string
from mutmut.mutation.pragma_handling import IgnoredCode

ROOT = Path(__file__).resolve().parents[1]
SHARE = 0.9
# tests/simulation runs these on schedules of known defects and on this number of others.
SIMULATED = (
    "hpc/run/budget.py", "hpc/run/causes.py", "hpc/slurm/handover.py", "hpc/supervise/decide.py",
    "hpc/supervise/perform.py", "jobs/claim.py", "jobs/control/coordinator.py", "jobs/control/silent_nodes.py",
    "jobs/control/root_failure.py", "jobs/control/round_members.py", "jobs/ending.py", "jobs/last_resort.py",
    "jobs/next_attempt.py",
)  # fmt: skip
SCHEDULES = 150
# Either half takes 40 s without a mutant on a slow processor; one that takes longer than this hangs.
SIMULATION_SECONDS = 300
# A mutant that cannot be imported does not count: any test would notice it.
NO_MUTANT = 99
Table = cst.Set | cst.Tuple | cst.List | cst.Dict


def shorter(table: Table) -> Iterator[Table]:
    """The table without one of its entries."""
    if len(table.elements) > 1 and (table.lpar or not isinstance(table, cst.Tuple)):
        for entry in table.elements:
            yield table.with_changes(elements=[other for other in table.elements if other is not entry])


def negated(branch: cst.If | cst.While | cst.CompIf) -> Iterator[cst.CSTNode]:
    test = branch.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield branch.with_changes(test=cst.UnaryOperation(cst.Not(), test))


def without_call(statement: cst.Expr) -> Iterator[cst.CSTNode]:
    if isinstance(statement.value, cst.Call):
        yield cst.Pass()


def word(text: cst.SimpleString) -> Iterator[cst.CSTNode]:
    """Another word, or another pattern; a text with a space is for people."""
    changes = list(operator_string(text))
    yield from changes if "r" in text.prefix else changes[: " " not in text.value]


OPERATORS = [
    *((node, operator) for node, operator in mutation_operators if operator is not operator_string),
    (cst.SimpleString, word),
    (Table, shorter),
    ((cst.If, cst.While, cst.CompIf), negated),
    (cst.Expr, without_call),
]


class Mutations(MutationVisitor):
    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        """As mutmut, but for the functions with decorators: here they are copied nowhere, so that all may change."""
        return not isinstance(node, cst.FunctionDef) and super()._skip_node_and_children(node)


def mutants_of(path: str, every: int) -> list[str]:
    """The texts of all mutants of a file, or of each tenth, say."""
    source = (ROOT / path).read_text()
    module = cst.MetadataWrapper(cst.parse_module(source))
    visitor = Mutations(OPERATORS, IgnoredCode(set(), set(), set()))
    tree = module.visit(visitor)
    texts = (deep_replace(tree, change.original_node, change.mutated_node).code for change in visitor.mutations)
    return [text for text in dict.fromkeys(texts) if text != source][::every]


def import_libraries(tests: list[str]) -> None:
    """Leaves what the tests import in this process, but for our own modules."""
    with Path("log").open("w") as log, contextlib.redirect_stdout(log):
        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *tests])
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(Path.cwd())):
            del sys.modules[name]


def run_tests(path: str, tests: list[str], seconds: float) -> int:
    """The status of pytest in a fork; it is killed after `seconds`, which counts as noticed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for descriptor in (1, 2):
            os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        try:
            importlib.import_module(path.removesuffix(".py").replace("/", "."))
        except BaseException:  # noqa: BLE001  # whatever a mutant may raise
            os._exit(NO_MUTANT)
        status = 1
        try:
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
        finally:  # whatever it raises, this fork must not go on: it would remove the copy
            os._exit(status)
    end = time.monotonic() + seconds
    try:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.01)
    finally:  # it has a session of its own: a Ctrl-C does not reach it, nor what it has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[1])


def simulate(path: str) -> int:
    """Return 0 if no schedule notices the mutant."""
    module = path.removesuffix(".py").replace("/", ".")
    if subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode:
        return NO_MUTANT
    for schedules in (("--known", "--seeds=2"), (f"--seeds={SCHEDULES}",)):
        command = [sys.executable, "-m", "tests.simulation", "--until-first", "--processes=1", *schedules]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=SIMULATION_SECONDS)
        except subprocess.TimeoutExpired:
            return 1
        if done.returncode:
            return 1
    return 0


def change_of(source: str, text: str) -> list[str]:
    """Return the removed and the added lines, after the line number."""
    return list(difflib.unified_diff(source.splitlines(), text.splitlines(), lineterm="", n=0))[2:]


def examine(path: str, tests: list[str], same: dict[str, str], every: int) -> bool:
    """Whether the tests, or the simulation if there are none, notice enough mutants of a file; prints the others."""
    source, started = Path(path).read_text(), time.monotonic()
    sys.dont_write_bytecode = False
    if tests and (status := run_tests(path, tests, 600)) != 0:
        sys.exit(f"the tests fail without a change ({status}):\n{Path('log').read_text()}")
    seconds = 10 + 5 * (time.monotonic() - started)
    # A mutant of the same second and size would be taken for its original, by the byte code.
    sys.dont_write_bytecode = True
    if tests:
        Path(importlib.util.cache_from_source(path)).unlink()
        import_libraries(tests)
    counts, unused = Counter[str](), set(same)
    for text in mutants_of(path, every):
        change = change_of(source, text)
        key = " ".join(line[1:].strip() for line in change if line.startswith("+"))
        if (key := change[1][1:].strip() if key in {"", "pass"} else key) in same:
            unused.discard(key)
            counts["same"] += 1
            continue
        Path(path).write_text(text)
        status = run_tests(path, tests, seconds) if tests else simulate(path)
        counts["broken" if status == NO_MUTANT else "noticed" if status else "missed"] += 1
        if status == 0:
            print(path, *change, sep="\n", flush=True)
    Path(path).write_text(source)
    noticed, missed = counts["noticed"], counts["missed"]
    print(f"{path}: {noticed} of {noticed + missed} mutants noticed; {counts['same']} change nothing", flush=True)
    if unused and every == 1:
        sys.exit(f"tests/mutants.toml has changes of {path} that no mutant makes: {unused}")
    return noticed >= SHARE * (noticed + missed)


def main(room: str = "", every: str = "1") -> int:
    os.chdir(ROOT)
    rooms = tomllib.loads((ROOT / "tests/mutants.toml").read_text())
    simulated = room == "simulated"
    chosen = list(SIMULATED) if simulated else [path for path in rooms if path.startswith(room)]
    if not chosen:
        sys.exit(f"tests/mutants.toml names no module that starts with {room!r}")
    files = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the copy is removed
    with tempfile.TemporaryDirectory(prefix="torchrelay-mutants.", dir="/var/tmp") as copy:
        for name in filter(os.path.exists, files.stdout.split("\0")):
            (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, Path(copy) / name)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": copy, "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path[0] = copy
        if simulated and simulate(chosen[0]) != 0:
            sys.exit("the simulation fails without a change: run python -m tests.simulation")
        entries = [(path, rooms.get(path, {})) for path in chosen]
        enough = [
            examine(path, [] if simulated else entry["tests"], entry.get("same", {}), int(every))
            for path, entry in entries
        ]
    return 0 if all(enough) or simulated else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
