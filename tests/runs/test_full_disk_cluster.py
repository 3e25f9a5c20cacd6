"""A job of a real Slurm that starts on a full disk waits for space: no node is blamed, and the run continues."""

import pytest
from support.cluster import TWO_NODES, WAITS_AT_FIRST, Site, add_script, agent_pids, fill, mounted_volume

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
NODES = ("gpu01", "gpu02", "gpu03", "gpu04")


def test_run_goes_on_as_soon_as_there_is_space(site: Site) -> None:
    add_script(site, "waits.py", WAITS_AT_FIRST)
    with mounted_volume(site.path / "volume", "size=200m,mode=755") as volume:
        run = site.submit(*TWO_NODES, "--name=full", "--runs-dir=volume", "--continue-with=requeue", "--", "waits.py")
        run.wait("its start", lambda: run.events("rendezvous"))
        site.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
        run.wait("the requeue", lambda: run.queue("%T %r") == "PENDING BeginTime")
        filler = fill(volume)
        run.wait_for_next_job()
        run.wait("the agents of the second start", lambda: sum(len(agent_pids(run, node)) for node in NODES) == 2)
        status = run.status()
        assert status["state"] == "running"
        assert any("no space is left" in warning for warning in status["warnings"])
        assert [event["attempt"] for event in run.events("claimed")] == [1]
        filler.unlink()
        status = run.wait_for_state("completed")
        kinds = {event["event"] for event in run.events("excluded") + run.events("resubmitted")}
        assert not kinds, run.evidence()
        assert [attempt["cause"] for attempt in status["attempts"]] == ["requeued", "completed"]
