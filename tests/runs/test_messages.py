"""Messages of real jobs: from the nodes, or by the supervisor what they could not send."""

import json

import pytest
from support.cluster import WAITS_AT_FIRST, Run, Site, add_script
from support.message_server import SECRET, inbox, write_recipients

from hpc.cluster.testbed.layout import LOGIN_ADDRESS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def submit(site: Site, *arguments: str) -> Run:
    flags = ("--gpus-per-node=1", "--cpus-per-gpu=1", "--notify=all", "--name=r")
    return site.submit(*flags, *arguments, XDG_CONFIG_HOME=str(site.path / "home"))


def outcomes(run: Run, recipient: str) -> list[tuple[str, str]]:
    """What became of each message to a recipient."""
    found = [*run.events("notification_sent"), *run.events("notification_failed")]
    return [(event["notice"], event["event"]) for event in found if event["recipient"] == recipient]


def assert_secret_is_nowhere(run: Run) -> None:
    files = [path for path in run.directory.path.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def age_messages(run: Run) -> None:
    """As if they had been tried five minutes ago."""
    for path in run.directory.events.glob("notice-*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**event, "time": event["time"] - 300}) + "\n" for event in events))


def test_complete_run_sends_its_message_once(site: Site) -> None:
    add_script(site, "a.py", WAITS_AT_FIRST)
    with inbox(LOGIN_ADDRESS) as found:
        write_recipients(site.path / "home", hook=found.address)
        run = submit(site, "--nodes=2", "--", "a.py")
        run.wait("the start", lambda: run.events("rendezvous"))
        site.slurm("scontrol", "requeue", run.job_id)
        run.wait_for_next_job()
        run.wait("the message", lambda: outcomes(run, "hook"))
    assert found.titles == ["Run r is complete"]
    assert outcomes(run, "hook") == [("completed-002", "notification_sent")]
    assert_secret_is_nowhere(run)


def test_supervisor_sends_what_the_nodes_of_a_failed_run_could_not(site: Site) -> None:
    add_script(site, "a.py", "raise SystemExit('broken')\n")
    with inbox(LOGIN_ADDRESS) as found, inbox(LOGIN_ADDRESS) as behind:
        out_of_reach = f"json://{SECRET}@{LOGIN_ADDRESS}:1/{SECRET}"
        write_recipients(site.path / "home", hook=found.address, later=out_of_reach)
        run = submit(site, "--", "a.py")
        run.wait("the messages", lambda: outcomes(run, "hook") and outcomes(run, "later"))
        run.wait("the end of the job", lambda: not run.is_alive())
        assert outcomes(run, "later") == [("failed-001", "notification_failed")]
        assert found.titles == ["Run r has failed"]
        assert "broken" in found.texts[0]
        assert_secret_is_nowhere(run)
        unsent = run.status()["unsent"]
        assert [(one["notice"], one["recipient"]) for one in unsent] == [("failed-001", "later")]
        assert unsent[0]["problem"]

        write_recipients(site.path / "home", hook=found.address, later=behind.address)
        age_messages(run)
        for _ in range(2):
            done = site.hpc("supervise", "--once", "--json", XDG_CONFIG_HOME=str(site.path / "home"))
            assert done.returncode == 0, done.stdout + done.stderr
        assert behind.titles == found.titles == ["Run r has failed"]
        assert run.status()["unsent"] == []
