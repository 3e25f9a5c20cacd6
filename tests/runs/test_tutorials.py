"""The commands of README and docs/tutorials work in their order, and print what stands below them but for numbers.

Left out are `make demo`, `make test` and `hpc testbed`: the tests need their own testbed.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cluster import ROOT, Run, Site, add_script, site_without_slurm
from support.fake_slurm import write_programs

from hpc.run.rundir import RunDir
from hpc.slurm.alive import local_jobs

pytestmark = pytest.mark.timeout(600)
TUTORIALS = ROOT / "docs/tutorials"


def blocks(page: Path) -> list[tuple[list[str], list[str]]]:
    """The commands of each block of bash of a page, and the lines of the output that follows it."""
    found = re.findall(r"```bash\n(.*?)```\n(?:\n```text\n(.*?)```)?", page.read_text(), re.DOTALL)
    return [(commands.splitlines(), text.splitlines()) for commands, text in found]


def block_with(page: Path, words: str) -> list[str]:
    """The commands of the first block of a page that has these words."""
    return next(commands for commands, _ in blocks(page) if words in "\n".join(commands))


def scripts_of(page: Path) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def masked(line: str) -> str:
    """The words of the line without numbers, and sorted: how large the parts of a duration are decides their order."""
    counted = re.sub(r"[\d:.,]+", "#", line)
    return " ".join(sorted(re.sub(r"(# \w+)s\b", r"\1", counted).split()))  # this machine may have 1 CPU, or 2 CPUs


def assert_shown(expected: list[str], printed: str) -> None:
    """Each line that is shown was printed, in this order; `...` stands for lines, or the end of one."""
    lines = iter(printed.splitlines())
    for line in filter(lambda one: one != "...", expected):
        start = len(line.split()) - 1 if line.endswith(" ...") else None
        words = masked(" ".join(line.split()[:start]))
        there = any(masked(" ".join(one.split()[:start])) == words for one in lines)
        assert there, f"{line!r} is not in, or not in this order:\n{printed}"


def follow(page: Path, site: Site, waits: dict[int, Callable[[], object]], **environment: str) -> None:
    """Type the commands of a page, and compare what they print. A block may wait for a condition, as the page says."""
    for number, (commands, expected) in enumerate(blocks(page)):
        waits.get(number, lambda: None)()
        for command in (shlex.split(one) for one in commands):
            if command[0] == "hpc" and command[1] != "testbed":
                done = site.hpc(*command[1:], COLUMNS="160", **environment)
                assert done.returncode == 0, done.stderr
                if expected:
                    assert_shown(expected, done.stdout)


@pytest.mark.slurm
def test_first_run_prints_what_it_shows(site: Site) -> None:
    run = Run(site, RunDir(site.path / "runs/first"), "")
    waits: dict[int, Callable[[], object]] = {
        2: lambda: run.wait("step 200", lambda: max(run.steps(), default=0) >= 200),
        4: lambda: (run.wait("its result", run.directory.final_result.exists, 400), run.wait_for_state("completed")),
    }
    follow(TUTORIALS / "first-run.md", site, waits)
    assert not run.directory.path.exists(), "the last command has removed it"


def test_own_script_prints_what_it_shows() -> None:
    page = TUTORIALS / "own-script.md"
    with site_without_slurm() as site:
        add_script(site, "train.py", scripts_of(page)[0])
        run = Run(site, RunDir(site.path / "runs/first"), "")
        waits: dict[int, Callable[[], object]] = {
            2: lambda: run.wait_for_steps(10),
            5: lambda: run.wait_for_more_steps(attempt=2),
        }
        follow(page, site, waits, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert site.hpc("cancel", "first").returncode == 0
        run.wait("the end of the run", lambda: not local_jobs(run.directory))


# Stands for a `uv tool install` that has downloaded the packages: the nodes of the tests have no network.
UV = """
[ "$1 $2" = "tool install" ] || exit 2
tool="$HOME/.local/share/uv/tools/torchrelay"
{python} -m venv "$tool"
echo "import sys; sys.path.insert(0, '{packages}')" > "$(echo "$tool"/lib/python3.*/site-packages)/installed.pth"
{uv} pip install --quiet --offline --no-deps --no-build-isolation --python "$tool/bin/python" "$3"
mkdir -p "$HOME/.local/bin"
ln -s "$tool/bin/hpc" "$HOME/.local/bin/hpc"
"""
# What README's scripts do not show. The first attempt trains until it is interrupted, the next two epochs more.
AROUND = """
import os, sys, time
from pathlib import Path
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

run = Path(os.environ["TORCHRELAY_RUN_DIR"])
epochs = 1_000_000 if os.environ["TORCHRELAY_ATTEMPT"] == "1" else len(list(run.glob("epoch-*"))) + 2
rank = int(os.environ["RANK"])
distributed.init_process_group("gloo")
torch.manual_seed(0)


class Sampler(DistributedSampler):
    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        (run / f"epoch-{epoch}").touch()


inputs = torch.randn(256, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = Sampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
assert sys.argv[1] == "--lr"
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))


def train_one_step(batch):
    time.sleep(0.1)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def train_one_epoch(epoch):
    sampler.set_epoch(epoch)
    for batch in loader:
        train_one_step(batch)


"""
END = """
torch.save(model.state_dict(), run / f"model-{rank}.pt")
distributed.destroy_process_group()
"""


@dataclass(frozen=True)
class Newcomer:
    """Somebody with a new home directory on the cluster, who types into a shell, and `y` where a command asks."""

    site: Site

    @property
    def home(self) -> Path:
        """On the storage that all nodes share."""
        return self.site.path / "home"

    def type(self, text: str, directory: Path) -> str:
        """Type lines of bash, each of which must succeed. Returns what they print."""
        path = f"{self.home}/.local/bin:{self.home}/programs:{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = {"SLURM_CONF": self.site.slurm_conf, "HOME": str(self.home), "PATH": path, "COLUMNS": "160"}
        keyboard, terminal = os.openpty()
        os.write(keyboard, b"y\n")
        done = subprocess.run(
            ["bash", "-ec", text], cwd=directory, env={**os.environ, **settings}, stdin=terminal,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=500,
        )  # fmt: skip
        os.close(keyboard)
        os.close(terminal)
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        return done.stdout

    def submitted(self, directory: Path, name: str) -> Run:
        """A run that was submitted in a directory."""
        return Run(self.site, RunDir(directory / "runs" / name), "")


@pytest.fixture
def newcomer(site: Site) -> Newcomer:
    """Has an empty home directory."""
    (site.path / "home").mkdir()
    return Newcomer(site)


def install(person: Newcomer) -> None:
    """Do what README's section Install says."""
    uv, packages = Path(sys.executable).with_name("uv"), sysconfig.get_path("purelib")
    write_programs(person.home / "programs", uv=UV.format(python=sys.executable, uv=uv, packages=packages))
    subprocess.run(["git", "clone", "--quiet", ROOT, person.home / "torchrelay"], check=True)
    printed = person.type("\n".join(block_with(ROOT / "README.md", "uv tool install")), person.home / "torchrelay")
    assert re.search(r"problems?, \d+ notes?$", printed, re.MULTILINE), printed


def preempt_as_shown(newcomer: Newcomer, block: list[str], project: Path, run: Run) -> None:
    """Type a block that submits a run and preempts it, which the run survives."""
    for line in block:
        if line.startswith("hpc drill"):
            run.wait("progress", lambda: (run.directory.path / "epoch-1").exists() or len(run.steps()) > 5)
        newcomer.type(line, project)
    status = run.wait_for_state("completed")
    assert [attempt["cause"] for attempt in status["attempts"]] == ["preempted", "completed"]


@pytest.mark.slurm
def test_readme_installs_hpc_and_makes_scripts_survive_a_preemption(newcomer: Newcomer) -> None:
    readme = ROOT / "README.md"
    install(newcomer)
    for step, script in enumerate(scripts_of(readme), 1):
        project = newcomer.home / f"project-{step}"
        project.mkdir()
        (project / "train.py").write_text(AROUND + script + END)
        run = newcomer.submitted(project, "my-run")
        preempt_as_shown(newcomer, block_with(readme, "--name my-run"), project, run)
        assert len(list(run.directory.path.glob("model-*.pt"))) == 2
        assert step == 1 or run.status()["steps_lost"] == 0


# As README's `train.py`, with other arguments: of the examples in docs/how-to/own-script.md.
ARGUMENTS = """
import os, sys
from pathlib import Path

if sys.argv[1] == "--data":
    assert (Path(sys.argv[2]) / "rose.jpg").exists() and sys.argv[3:] == ["--lr", "0.1"]
else:
    assert sys.argv[1] == "--output" and Path(sys.argv[2]).parent == Path(os.environ["TORCHRELAY_RUN_DIR"])
"""


@pytest.mark.slurm
def test_own_script_survives_a_preemption_on_slurm(newcomer: Newcomer) -> None:
    page, project = ROOT / "docs/how-to/own-script.md", newcomer.home / "my-project"
    project.mkdir()
    (project / "train.py").write_text(scripts_of(TUTORIALS / "own-script.md")[0])
    run = newcomer.submitted(project, "second")
    preempt_as_shown(newcomer, block_with(page, "--name second"), project, run)
    examples, photo = newcomer.home / "examples", newcomer.site.path / "rose.jpg"
    (examples / "package").mkdir(parents=True)
    for name in ("train.py", "package/train.py"):
        (examples / name).write_text(ARGUMENTS)
    photo.touch()
    with tarfile.open(newcomer.site.path / "flowers.tar", "w") as archive:
        archive.add(photo, photo.name)
    newcomer.type("\n".join(block_with(page, "/shared/")).replace("/shared", str(newcomer.site.path)), examples)
    submitted = [newcomer.submitted(examples, path.name) for path in (examples / "runs").glob("[!.]*")]
    assert len(submitted) == 2
    for example in submitted:
        example.wait_for_state("completed")
