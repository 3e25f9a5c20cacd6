"""The transport under attack: a first node's agent and another's, and thousands of connections from others."""

import random
import subprocess
import sys
import threading
import time

from support.attacks import attack
from support.cluster import ROOT
from support.waiting import wait_for

from hpc.base.transport import Limits, connect
from jobs.control.channel import LOST_SECONDS, ControlClient
from jobs.control.messages import NodeStatus

SECRET = "secret"
LIMITS = Limits(timeout_seconds=20, max_message_bytes=2**20)
# For every line: whether the other agent is lost, the number of open files, that of threads.
HEAD = """
import os, resource, sys, threading
from jobs.control.channel import ControlServer
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
server = ControlServer("secret", 2)
print(server.port, flush=True)
for _ in sys.stdin:
    print(server.is_silent(1), len(os.listdir("/proc/self/fd")), threading.active_count(), flush=True)
"""


def test_ten_thousand_hostile_connections_leave_the_agents_untouched() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HEAD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        port = int(head.stdout.readline())

        def look() -> tuple[str, int, int]:
            assert head.stdin is not None
            assert head.stdout is not None
            print(file=head.stdin, flush=True)
            silent, files, threads = head.stdout.readline().split()
            return silent, int(files), int(threads)

        client = ControlClient(["127.0.0.1"], port, SECRET, NodeStatus(node_rank=1))
        assert client.met.wait(30)
        _, *before = look()
        attackers = [threading.Thread(target=attack, args=(port, seed, 2500)) for seed in range(4)]
        for attacker in attackers:
            attacker.start()
        while any(attacker.is_alive() for attacker in attackers):
            assert look()[0] == "False", "the first node hears the other agent"
            assert client.silent_seconds < LOST_SECONDS, "and the other way round"
            time.sleep(0.2)
        # With the secret, too, what is no message ends its connection alone.
        for seed in range(100):
            with connect(("127.0.0.1", port), SECRET, "control", LIMITS) as connection:
                connection.send_bytes(random.Random(seed).randbytes(seed))
        wait_for(lambda: look()[1:] == tuple(before))  # no thread and no connection is left
        client.close()
        head.stdin.close()
