"""A job of a real Slurm that starts on a full disk waits for space: no node is blamed, and the run continues."""

import time

import pytest
from support.cluster import ENDLESS, Site, fill, mounted_volume

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_run_goes_on_as_soon_as_there_is_space(site: Site) -> None:
    with mounted_volume(site.path / "volume", "size=200m,mode=755") as volume:
        run = site.submit("--data=data", "--name=full", "--runs-dir=volume", *ENDLESS)
        run.wait_for_steps(20)
        site.slurm("scancel", "--signal=TERM", f"{run.job_id}.0")
        run.wait_for_release()
        done = len(run.steps())
        filler = fill(volume)
        run.wait("the second start", lambda: run.queue("%T") == "RUNNING")
        time.sleep(8)  # meanwhile the agents find the disk full
        status = run.status()
        assert status["state"] == "running"
        assert any("no space is left" in warning for warning in status["warnings"])
        assert [event["attempt"] for event in run.events("claimed")] == [1]
        filler.unlink()
        run.wait("new steps", lambda: len(run.steps()) > done + 20)
        kinds = {event["event"] for event in run.events("excluded") + run.events("resubmitted")}
        assert not kinds, run.evidence()
        assert [attempt["cause"] for attempt in run.status()["attempts"]] == ["requeued", None]
        run.cancel()
