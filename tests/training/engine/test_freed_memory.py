"""Memory that a step frees is there for the next one, without the kernel."""

from pathlib import Path

from support.trainings import run_forked

# In a process of its own: the C library is set for good. Huge pages would make the faults few; and by default glibc
# decides by what it has allocated before whether a tensor is given back.
STEPS = """
import ctypes, resource, sys, torch
PR_SET_THP_DISABLE, M_MMAP_THRESHOLD = 41, -3
library = ctypes.CDLL(None)
library.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
library.mallopt(M_MMAP_THRESHOLD, 2**17)
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


def page_faults(memory: str, directory: Path) -> int:
    done = run_forked(STEPS, memory, directory=directory)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_steps_reuse_memory(tmp_path: Path) -> None:
    assert page_faults("kept", tmp_path) < 1000
    assert page_faults("given back", tmp_path) > 100_000, "ten steps of 64 MiB"
