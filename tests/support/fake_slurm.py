"""Shell scripts that replace Slurm's commands, for behaviour that a real Slurm does not show on demand."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.cluster import Site

# What the testbed prints.
SINFO_TEXT = """gpu*|up|1-00:00:00|1:00:00|1-infinite|4|8|gpu:4
urgent|up|4:00:00|30:00|1-infinite|4|8|gpu:4"""
SINFO = f"""case "$*" in
    *'%N|%P|%T'*) printf 'gpu0%d|gpu*|idle\\n' 1 2 3 4;;
    *'%N|%T'*) printf 'gpu0%d|idle\\n' 1 2 3 4;;
    *) echo '{SINFO_TEXT}';;
esac"""
# Queues one job for each call, also for several at once; SQUEUE lists them. {0} is the site.
SBATCH = (
    'for script; do :; done; {{ flock 9; echo "$script" >&9; id=$(wc -l < {0}/queued); }} 9>> {0}/queued; '
    'case "$*" in *--parsable*) echo $id;; *) echo Submitted batch job $id;; esac'
)
SQUEUE = """[ -e {0}/queued ] && while read script; do
    id=$((id + 1)); echo "$id|PENDING|None||n/a|0|N/A|N/A|$script|"
done < {0}/queued; exit 0"""
HANGS = "touch {0}/reached; while [ -e {0} ] && [ ! -e {0}/go ]; do sleep 0.1; done"


def queued(site: Site) -> list[str]:
    """Return the runs whose jobs are queued in Slurm."""
    return [Path(line).parent.name for line in (site.path / "queued").read_text().splitlines()]


def write_programs(directory: Path, **programs: str) -> str:
    """Write these shell scripts, also while others call them; return a PATH that starts with their directory.

    With an sbatch goes an srun, which submitit looks for.
    """
    directory.mkdir(exist_ok=True)
    others = {"srun": 'exec /usr/bin/srun "$@"'} if "sbatch" in programs else {}
    for name, text in (others | programs).items():
        new = directory / f"{name}.new"
        new.write_text(f"#!/bin/sh\n{text}\n")
        new.chmod(0o755)
        new.replace(directory / name)
    return f"{directory}:{os.environ['PATH']}"


def queueing_site(path: Path) -> tuple[Site, dict[str, str]]:
    """Return a site whose Slurm queues jobs but starts none, and the environment that uses it."""
    programs = {"sbatch": SBATCH.format(path), "squeue": SQUEUE.format(path), "sinfo": SINFO, "scontrol": "exit 1"}
    # The real one would wait for its slurmdbd.
    programs["sacct"] = "exit 1"
    return Site(path, "/nonexistent"), {"PATH": write_programs(path / "bin", **programs), "SLURM_CONF": "/nonexistent"}


def replace(site: Site, name: str, text: str | None) -> None:
    """Replace a program of the site; None removes it."""
    if text is None:
        (site.path / "bin" / name).unlink()
    else:
        write_programs(site.path / "bin", **{name: text.format(site.path)})


@contextmanager
def started(site: Site, environment: dict[str, str], *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Start a verb and wait until it runs the program that HANGS; kill it and its children at the end."""
    command = [sys.executable, "-m", "hpc", *arguments]
    own = {**os.environ, **environment}
    with subprocess.Popen(
        command, cwd=site.path, env=own, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as verb:
        try:
            while not (site.path / "reached").exists():
                assert verb.poll() is None, verb.communicate()
                time.sleep(0.02)
            (site.path / "reached").unlink()
            yield verb
        finally:
            if verb.poll() is None:
                os.killpg(verb.pid, signal.SIGKILL)


def kill_when_reached(site: Site, environment: dict[str, str], *arguments: str) -> None:
    """Start a verb, and kill it when it runs the program that HANGS."""
    with started(site, environment, *arguments):
        pass
