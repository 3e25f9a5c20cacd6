"""Memory that a step frees is there for the next one, without the kernel."""

import subprocess
import sys

from cluster import ROOT

# In a process of its own: the C library is set for good.
STEPS = """
import resource, sys, torch
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
    done = subprocess.run([sys.executable, "-c", STEPS, memory], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_steps_reuse_memory() -> None:
    assert page_faults("kept") < 1000
    assert page_faults("as it comes") > 10_000, "nothing to win: ten steps of 64 MiB would take no pages"
