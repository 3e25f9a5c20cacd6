"""Messages of real jobs: from the nodes, or by the supervisor what they could not send."""

import json

import pytest
from support.cluster import WAITS_AT_FIRST, Run, Site, add_script
from support.message_server import SECRET, inbox, write_recipients

from hpc.cluster.testbed.layout import LOGIN_ADDRESS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def submit(site: Site, *arguments: str) -> Run:
    flags = ("--gpus-per-node=1", "--cpus-per-gpu=1", "--notify=all", "--notify-interruptions=0", "--name=r")
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


def test_run_that_is_interrupted_and_complete_sends_both_messages_once(site: Site) -> None:
    add_script(site, "a.py", WAITS_AT_FIRST)
    with inbox(LOGIN_ADDRESS) as found:
        write_recipients(site.path / "home", hook=found.address)
        run = submit(site, "--nodes=2", "--", "a.py")
        run.wait("the start", lambda: run.events("rendezvous"))
        site.slurm("scontrol", "requeue", run.job_id)
        # The requeue ends all that the job has left, but not this.
        run.wait("the first message", lambda: outcomes(run, "hook"))
        run.wait_for_next_job()
        run.wait("the second message", lambda: len(outcomes(run, "hook")) == 2)
    assert found.titles == ["Run r was interrupted", "Run r is complete"]
    assert "requeued" in found.texts[0]
    sent = [(key, "notification_sent") for key in ("interrupted-001", "completed-002")]
    assert outcomes(run, "hook") == sent
    assert_secret_is_nowhere(run)


def test_supervisor_sends_what_the_nodes_of_a_failed_run_could_not(site: Site) -> None:
    add_script(site, "a.py", "raise SystemExit('broken')\n")
    with inbox(LOGIN_ADDRESS) as found, inbox(LOGIN_ADDRESS) as behind:
        out_of_reach = f"json://{SECRET}@{LOGIN_ADDRESS}:1/{SECRET}"
        write_recipients(site.path / "home", hook=found.address, later=out_of_reach)
        run = submit(site, "--", "a.py")
        run.wait("the messages", lambda: len(outcomes(run, "hook")) == len(outcomes(run, "later")) == 2)
        run.wait("the end of the job", lambda: not run.is_alive())
        keys = ["interrupted-001", "failed-001"]
        assert outcomes(run, "later") == [(key, "notification_failed") for key in keys]
        assert found.titles == ["Run r was interrupted", "Run r has failed"]
        assert "broken" in found.texts[1]
        assert_secret_is_nowhere(run)
        unsent = run.status()["unsent"]
        assert [(one["notice"], one["recipient"]) for one in unsent] == [(key, "later") for key in keys]
        assert all(one["problem"] for one in unsent)

        write_recipients(site.path / "home", hook=found.address, later=behind.address)
        age_messages(run)
        for _ in range(2):
            done = site.hpc("supervise", "--once", "--json", XDG_CONFIG_HOME=str(site.path / "home"))
            assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(behind.titles) == sorted(found.titles)
        assert len(found.titles) == 2
        assert run.status()["unsent"] == []
