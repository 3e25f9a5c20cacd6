"""Memory that a step frees is there for the next one, without the kernel; loader workers keep none of it."""

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
from hpc.base.kernel import MOST_FREED_BYTES, keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory(MOST_FREED_BYTES)
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


MEMORY = """
from pathlib import Path
import torch
from training.data.batch_schedule import BatchRequest
from training.data.loader import Batch, load_batches
from hpc.base.kernel import MOST_FREED_BYTES, keep_freed_memory

def megabytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

class Images:
    def __getitem__(self, request):
        nothing = torch.zeros(0)
        return Batch(nothing, torch.tensor([megabytes()]), nothing, nothing)

keep_freed_memory(MOST_FREED_BYTES)
tensors = [torch.ones(8 * 2**18) for _ in range(16)]
del tensors
kept = megabytes()
with load_batches(Images(), [BatchRequest(indices=(), epoch=None)], 1, pin_memory=False) as batches:
    print(kept - int(next(batches).labels))
"""


def test_a_worker_keeps_no_memory_that_the_rank_has_freed(tmp_path: Path) -> None:
    done = run_forked(MEMORY, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100, "16 tensors of 8 MiB were freed"
