"""Memory that a step frees is there for the next one, without the kernel."""

import os
import subprocess
import sys

from support.cluster import ROOT

# In a process of its own: the C library is set for good. Huge pages would make the faults few.
STEPS = """
import ctypes, resource, sys, torch
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
from training.engine.freed_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    tensors = [torch.ones(size * 2**18) for size in [8] * 8]  # MiB
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(memory: str) -> int:
    # So each tensor is given back. By default glibc decides by what it has allocated before.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    command = [sys.executable, "-c", STEPS, memory]
    return int(subprocess.check_output(command, cwd=ROOT, env=environment, text=True))


def test_steps_reuse_memory() -> None:
    assert page_faults("kept") < 1000
    assert page_faults("given back") > 100_000, "ten steps of 64 MiB"
