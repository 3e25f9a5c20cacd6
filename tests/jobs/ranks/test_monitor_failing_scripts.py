"""If a script fails while its process group exists, the failure is recorded with its cause and message."""

import os
import sys
import time
from fnmatch import fnmatchcase

import pytest
from support.cluster import ROOT

from hpc.base.transport import pick_port
from hpc.run.events.kinds import RankFailed
from hpc.run.nodedir import NodeDir
from hpc.run.restart_budget import rank_signature
from jobs.control.channel import AgentClock
from jobs.control.root_failure import RootFailure
from jobs.ranks.monitor import LocalRanks
from jobs.ranks.rank_environment import torchrun_environment
from jobs.ranks.torchrun import PROCESS_WRAPPER, Rendezvous, Torchrun, torchrun_argv

pytestmark = pytest.mark.slow
# At each start, rank 1 fails in the next way and rank 0 loses its peer.
SCRIPT = """
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist

def fail(error):
    raise error

def misses_a_key():
    try:
        {}["lr"]
    except KeyError as error:
        raise ValueError("no learning rate") from error

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        raise ValueError("sample has no label")

def loses_its_peer():
    dist.destroy_process_group()
    time.sleep(1000)

ECC = "CUDA error: uncorrectable ECC error encountered\\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"
WAYS = {
    "error": lambda: fail(ValueError("loss of the cats is negative")),
    "other error": lambda: fail(ValueError("loss of the dogs is negative")),
    "assertion": lambda: fail(AssertionError("shapes differ:\\n  expected (3,)\\n  found (4,)")),
    "chain": misses_a_key,
    "loader worker": lambda: next(iter(torch.utils.data.DataLoader(Data(), num_workers=1))),
    "memory": lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\\nSee the docs")),
    "disk": lambda: torch.save(torch.ones(10**6), open("/dev/full", "wb")),
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "peer": loses_its_peer,
    "device": lambda: fail(RuntimeError(ECC)),  # the last: what fails in the round of a bad node is no other failure
}
restarts = int(os.environ["TORCHRELAY_RESTARTS"])
if restarts == len(WAYS):
    sys.exit()  # before there is a process group: neither rank can lose the other
dist.init_process_group("gloo")
way = list(WAYS)[restarts]
print("way:", way)
if dist.get_rank() == 1:
    WAYS[way]()
    time.sleep(1000)
dist.all_reduce(torch.ones(1))
"""
# The rank that failed first, its exit code, the cause, and a pattern of the message.
EXPECTED = [
    (1, 1, "crashed", "ValueError: loss of the cats is negative"),
    (1, 1, "crashed", "ValueError: loss of the dogs is negative"),
    (1, 1, "crashed", "AssertionError: shapes differ: expected (3,)"),
    (1, 1, "crashed", "ValueError: no learning rate (with KeyError: 'lr')"),
    (1, 1, "crashed", "ValueError: sample has no label (with *Caught ValueError in DataLoader worker process 0.)"),
    (1, 1, "out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."),
    (1, 1, "no_space", "RuntimeError: *unexpected pos* (with OSError: *No space left on device)"),
    (1, 3, "crashed", "way: exit"),
    (1, -9, "crashed", ""),
    (1, -11, "crashed", "Fatal Python error: Segmentation fault"),
    (1, 1, "crashed", "KeyboardInterrupt"),
    (0, 1, "crashed", "RuntimeError: *Connection * by peer*"),
    (1, 1, "bad_node", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[RankFailed]:
    """Return the failure that ended each start."""
    directory = tmp_path_factory.mktemp("node")
    for each in NodeDir(directory).directories:
        each.mkdir(exist_ok=True)
    (directory / "script.py").write_text(SCRIPT)
    alone = Rendezvous(
        run="r", attempt=1, secret="s", round=1, num_nodes=1, host="localhost", port=pick_port(), node=0
    )  # fmt: skip
    wrapper = [str(PROCESS_WRAPPER), "rank", str(directory), str(directory)]
    program = [*wrapper, "script", str(directory / "script.py")]
    argv = torchrun_argv(alone, 2, "127.0.0.1", sys.executable, program)
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", "TORCHRELAY_PRELOAD": ""}
    ranks, judge = LocalRanks(NodeDir(directory), 2, "gpu01", AgentClock()), RootFailure()
    ranks.begin(1, {})
    found, reported, deadline = list[RankFailed](), set[RankFailed](), time.monotonic() + 250
    with Torchrun(argv, torchrun_environment(alone, environment), ROOT) as torchrun:
        while torchrun.exit_code is None:
            assert time.monotonic() < deadline, reported
            reported |= set(ranks.new_failures())
            if root := judge.find(reported, all_heard=True):
                found.append(root)
            time.sleep(0.1)
        assert torchrun.exit_code == 0, (directory / "rank-01.log").read_text()
    assert len(found) == len(EXPECTED), found
    return found


@pytest.mark.parametrize("number", range(len(EXPECTED)), ids=[message for *_, message in EXPECTED])
def test_rank_cause_and_message(roots: list[RankFailed], number: int) -> None:
    root = roots[number]
    rank, exit_code, cause, message = EXPECTED[number]
    assert (root.rank, root.exit_code, root.cause) == (rank, exit_code, cause), root
    assert fnmatchcase(root.detail, message), root


def test_only_the_same_failure_has_the_same_signature(roots: list[RankFailed]) -> None:
    signatures = [rank_signature(each.cause, each.signal, each.exit_code, each.detail, each.step) for each in roots]
    known = [signature for signature in signatures if signature]
    assert len(known) == len(set(known)) == 9, signatures
