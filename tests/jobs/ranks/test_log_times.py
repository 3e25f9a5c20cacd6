"""The index of a log: real process wrappers print, and are killed."""

import os
import signal
import subprocess
import sys
import time

from support.waiting import wait_for

from hpc.core.nodedir import HeldNodeDir
from jobs.node_attempt import NodeAttempt
from jobs.ranks.log_times import noted_log_times
from jobs.ranks.torchrun import PROCESS_WRAPPER


def start_rank(node: NodeAttempt, held: HeldNodeDir, script: str) -> "subprocess.Popen[bytes]":
    logs = node.run.attempt_logs(1)
    logs.mkdir(parents=True, exist_ok=True)
    wrapper = [sys.executable, "-S", str(PROCESS_WRAPPER), "rank", str(logs), str(held.files.path), "sh", "-c", script]
    return subprocess.Popen(wrapper, env={**os.environ, "RANK": "3", "LOCAL_RANK": "0"}, start_new_session=True)


def test_every_byte_has_a_time_also_the_last_of_a_rank_that_was_killed(node: NodeAttempt, held: HeldNodeDir) -> None:
    log, times, began = node.run.rank_log(1, 3), node.run.rank_log_times(1, 3), time.time()
    with noted_log_times(node.run, 1, [3]):
        rank = start_rank(node, held, r"printf 'colour \033[1m, no line break'; sleep 600")
        wait_for(times.exists)
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        again = start_rank(node, held, "echo; echo again; sleep 600")
        wait_for(lambda: b"again" in log.read_bytes())
        os.killpg(again.pid, signal.SIGKILL)
        again.wait()
    assert log.read_bytes() == b"colour \033[1m, no line break\nagain\n", "nothing is added, and nothing is lost"
    noted = [line.split() for line in times.read_text().splitlines()]
    sizes, seconds = [int(size) for size, _ in noted], [float(moment) for _, moment in noted]
    assert sizes[-1] == log.stat().st_size
    assert sizes == sorted(sizes)
    assert began - 0.1 <= seconds[0] <= seconds[-1] <= time.time() + 0.1
