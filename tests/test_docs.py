"""README, docs and examples: every link, path, command, flag and make target in them exists."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import page
from hpc.__main__ import PROGRAMS, VERBS
from hpc.base import program
from hpc.programs.script_flags import ScriptFlags

ROOT = Path(__file__).parents[1]
PAGES = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
GENERATED = {"docs/reference/commands.md", "docs/reference/json.md", "docs/reference/events.md"}
# An example of a new command.
NOT_THERE = {"hpc/commands/runs/collect.py"}
# Of other programs and of the flags' own spelling.
OTHER_FLAGS = {
    *("help", "version", "json", "debug", "help-all", "watch", "quiet"),
    *("nproc-per-node", "standalone", "nnodes", "rdzv-backend", "rdzv-endpoint", "max-restarts"),  # torchrun
    *("no-kill", "requeue", "test-only", "signal", "gres", "overlap", "pty", "ntasks-per-node", "parsable", "format"),
    *("dependency", "duplicates", "nv", "without-fixes"),  # Slurm, Apptainer, tests.simulation
    *("cuts", "small", "extra", "editable", "user", "system", "index-url", "yes"),
}  # fmt: skip


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path = (here.parent / target).resolve() if target else here
        name = str(path.relative_to(ROOT))
        assert path.exists() or name in GENERATED, f"{page} links to {target}"
        if anchor and path.suffix == ".md" and path.exists():
            assert anchor in anchors(path.read_text()), f"{page} links to {target}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_paths_exist(page: str) -> None:
    for path in re.findall(r"`((?:hpc|jobs|training|tests|benchmarks|docs|examples)/[\w./-]+)`", text_of(page)):
        there = (ROOT / path).exists() or path in {*GENERATED, *NOT_THERE} or "NAME" in path
        assert there, f"{page} names {path}"


@pytest.mark.parametrize("page", [*PAGES, "Makefile"])
def test_modules_can_be_run(page: str) -> None:
    for module in re.findall(r"-m ((?:hpc|jobs|training|benchmarks)(?:\.[a-z_]+)*)\b(?!\.)", text_of(page)):
        path = ROOT / module.replace(".", "/")
        files = path.with_suffix(".py"), path / "__main__.py"
        assert module.removeprefix("hpc.") in VERBS or any(file.exists() for file in files), f"{page} runs {module}"


def flags_of_all_commands() -> Iterator[str]:
    from docs.site.generated import options_of

    for options in (*map(options_of, (*VERBS, *PROGRAMS)), ScriptFlags):
        yield from map(program.flag_name, program.flags(options))


REFUSED = {
    "fork": ("config", "recipe", "model", "seed", "weights", "synthetic", "help-all"),
    "evaluate": ("config", "python", "container", "help-all"),
    "sweep": ("dry-run", "wait"),
    "scaling": ("dry-run", "wait"),
}


@pytest.mark.parametrize("verb", REFUSED)
def test_page_of_a_command_lacks_the_flags_that_it_refuses(verb: str) -> None:
    from docs.site.generated import commands_page, options_of

    _, _, rest = commands_page().partition(f"## hpc {verb}\n")
    listed = set(re.findall(r"`--([a-z0-9-]+)`", rest.partition("\n## ")[0]))
    offered = {program.flag_name(field) for field in program.offered(options_of(verb))}
    assert listed == offered - {"json", "debug", "help-all", "run"}
    assert not {*listed, *offered} & set(REFUSED[verb])


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    return {*flags_of_all_commands(), *OTHER_FLAGS}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(("CHANGELOG", "benchmarks/"))])
def test_flags_and_commands_exist(page: str, known_flags: set[str]) -> None:
    commands = {*VERBS, *PROGRAMS, "help", "collect"}  # the last is CONTRIBUTING's example
    for line in text_of(page).splitlines():
        for command in re.findall(r"(?:^|`|&& |; |\$ )hpc ([a-z]+)\b", line):
            assert command in commands, f"{page}: {line}"
        # Behind `--` stand the words of a user's script; of other programs' lines, nothing is known.
        if re.search(r"\bhpc [a-z]+|^--|`--", line) and not re.search("sbatch|srun|squeue", line):
            ours = re.split(r" -- ", line)[0]
            for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)(?![\w-])", ours):
                assert flag.removeprefix("no-") in known_flags or flag in known_flags, f"{page}: --{flag} in {line}"


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"rivals"}
    known = {name for group in targets for name in group.split()}
    for target in re.findall(r"(?:^ *|`)make ([a-z][a-z-]+)", text_of(page), re.MULTILINE):
        assert target in known, f"{page}: make {target}"


def test_json_schema_is_that_of_the_code() -> None:
    from docs.site.json_schema import FILE, schema_text

    assert FILE.read_text() == schema_text(), "make docs writes it"


def test_environment_variables_are_those_of_the_code() -> None:
    """The page has each variable that users may read or set, and no other of ours."""
    code = "".join(path.read_text() for room in ("hpc", "jobs", "training") for path in (ROOT / room).rglob("*.py"))
    page = text_of("docs/reference/environment-variables.md")
    ours = r"\b(?:TORCHRELAY|SBATCH)_[A-Z_]+\b"
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert len(rows) == len(set(rows)), "a variable has two rows"
    named = set(re.findall(ours, page))
    # Between our own processes, and for tests.
    internal = {"CALLED", "DEVICE", "FAULT", "PARENT", "PRELOAD", "PYTHONPATH", "RESTARTS", "SECRET"}
    assert named == set(re.findall(ours, code)) - {f"TORCHRELAY_{name}" for name in internal} | {"SBATCH_EXPORT"}
    of_others = {"LOCAL_WORLD_SIZE", "XDG_CONFIG_HOME"}  # torchrun's, and platformdirs'
    for name in set(re.findall(r"`([A-Z][A-Z_]+)`", page)) - named - of_others:
        assert name in code, f"no line of the code has {name}"


@pytest.mark.parametrize("name", page.PAGES)
def test_measured_tables_are_those_of_the_results(name: str) -> None:
    assert page.page_of(name) == text_of(name), "type .venv/bin/python -m benchmarks.page"
