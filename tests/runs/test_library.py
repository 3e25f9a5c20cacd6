"""Every rank of a script imports the run's own copy of torchrelay, however it starts and whatever else has its name."""

import json
from pathlib import Path

import pytest
from support.cluster import add_script, site_without_slurm
from support.environments import SITE, make_torch_venv

from hpc.run.rundir import LIBRARY

pytestmark = pytest.mark.timeout(400)

SCRIPT = """
import multiprocessing, os, subprocess, sys
{first}
from torchrelay import report, state
import torch, torchrelay
import hpc, jobs, training

def where(_=0):
    return os.path.dirname(torchrelay.__file__)

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("found", where(), *pool.map(where, [0]), hpc.MINE, jobs.MINE, training.MINE, flush=True)
    program = "import os, torchrelay; print('found', os.path.dirname(torchrelay.__file__), flush=True)"
    subprocess.run([sys.executable, "-c", program], check=True)
    with state() as saved:
        for saved.step in (1, 2, 3):
            report(step=saved.step, loss=0.5)
    torch.distributed.destroy_process_group()
"""
FORMS = {
    "forked": ("", (), ("train.py",)),
    "own-python": ("os.environ['OMP_NUM_THREADS'] = '1'", (), ("train.py",)),
    "module-in-place": ("", ("--in-place",), ("-m", "package.train")),
}


@pytest.mark.parametrize("form", FORMS)
def test_rank_its_workers_and_its_programs_import_the_library_of_the_run(form: str) -> None:
    first, flags, program = FORMS[form]
    with site_without_slurm() as site:
        for name in ("hpc", "jobs", "training"):
            add_script(site, f"{name}/__init__.py", "MINE = True\n")
        for name in ("train.py", "package/train.py"):
            add_script(site, name, SCRIPT.format(first=first))
        environment = make_torch_venv(site.path / "env")
        (environment / SITE / "torchrelay").mkdir()
        (environment / SITE / "torchrelay" / "__init__.py").write_text("raise ImportError('of another version')\n")
        flags = (*flags, "--nodes=2", "--gpus-per-node=0", f"--python={environment}/bin/python", "--name=own")
        done = site.hpc("submit", "--cluster=local", *flags, "--wait", "--json", "--", *program)
        assert done.returncode == 0, done.stderr + done.stdout
        status = json.loads(done.stdout)["status"]
        assert (status["state"], status["step"], status["warnings"]) == ("completed", 3, [])
        library = str(Path(status["run_dir"], "code/.torchrelay/packages.zip", LIBRARY, "torchrelay"))
        for rank in (0, 1):
            log = Path(status["run_dir"], f"logs/attempt-001/rank-{rank:02d}.log").read_text().splitlines()
            found = [line.split()[1:] for line in log if line.startswith("found")]
            assert found == [[library, library, "True", "True", "True"], [library]], log
