"""What is worth a message."""

from pathlib import Path
from typing import Any

from support.events import attempt_ended, cancelled, claimed, event, of_message, resumed

from hpc.run.events.history import History
from hpc.run.events.kinds import Event
from hpc.run.spec import Notification
from hpc.services.notification.delivery import due_messages, without_address
from hpc.services.notification.notices import Notice, notice_of

RUN = Path("/shared/runs/r")


def began(attempt: int, at: float) -> Event:
    return claimed(at, attempt, job_id=str(attempt), nodes=("gpu01", "gpu02"))


def ended(attempt: int, at: float, cause: str, **fields: Any) -> Event:
    return attempt_ended(at, cause, attempt=attempt, **fields)


def key(*events: Event) -> str | None:
    notice = notice_of(RUN, History(events))
    return notice.key if notice else None


def test_run_that_goes_on_is_no_news() -> None:
    assert key() is key(began(1, 1)) is key(began(1, 1), ended(1, 2, "preempted")) is None


def test_end_says_what_happened_and_what_to_type() -> None:
    notice = notice_of(RUN, History([began(1, 1), ended(1, 2, "bad_input", step=7, detail="no such file")]))
    assert notice is not None
    assert (notice.key, notice.title, notice.time) == ("failed-001", "Run r has failed", 2)
    assert notice.body == (
        "Attempt 1, job 1 on gpu01, gpu02.\nIt ended after step 7: bad_input, no such file\n\nhpc logs /shared/runs/r"
    )
    notice = notice_of(RUN, History([began(1, 1), ended(1, 2, "completed")]))
    assert notice is not None
    assert (notice.key, notice.title) == ("completed-001", "Run r is complete")
    assert notice.body.endswith("\n\nhpc status /shared/runs/r")


def test_what_the_user_ended_or_resumed_is_no_news() -> None:
    failure = began(1, 1), ended(1, 2, "bad_input")
    assert key(began(1, 1), ended(1, 2, "cancelled")) is None
    assert key(*failure, cancelled(3)) is None
    assert key(*failure, resumed(3)) is None
    assert key(*failure, resumed(3), began(2, 4), ended(2, 5, "bad_input")) == "failed-002"


def test_run_that_slurm_does_not_continue_has_failed() -> None:
    stopped = event("not_continued", 3, attempt=1, detail="Slurm refuses")
    notice = notice_of(RUN, History([began(1, 1), ended(1, 2, "node_failure"), stopped]))
    assert notice is not None
    assert notice.key == "failed-001"
    assert "Nothing restarts the run (Slurm refuses): start hpc supervise, or type hpc resume\n" in notice.body
    assert key(began(1, 1), ended(1, 2, "node_failure"), stopped, began(2, 4)) is None


NOTICE = Notice(key="failed-001", title="t", body="b", time=1000.0)


def due(*events: Event, now: float, retry: bool) -> list[tuple[str, int]]:
    told = Notification(notify=("a", "b"))
    return [message[1:] for message in due_messages(told, NOTICE, History(events), now, retry=retry)]


def of(recipient: str, kind: str, at: float) -> Event:
    more = {"reason": "no answer"} if kind == "notification_failed" else {}
    return of_message(kind, at, notice=NOTICE.key, recipient=recipient, **more)


def test_each_recipient_gets_it_once() -> None:
    sent = of("a", "notifying", 1001), of("a", "notification_sent", 1002)
    assert due(now=1001, retry=False) == [("a", 1), ("b", 1)]
    assert due(*sent, now=2000, retry=True) == [("b", 1)]


def test_only_the_supervisor_retries_and_not_at_once_or_for_ever() -> None:
    failed = of("a", "notifying", 1001), of("a", "notification_failed", 1002), of("b", "notification_sent", 1002)
    killed = failed[0], failed[2]
    assert due(*failed, now=1030, retry=True) == []
    assert due(*failed, now=1100, retry=False) == []
    assert due(*failed, now=1100, retry=True) == due(*killed, now=1100, retry=True) == [("a", 2)]
    assert due(*failed, *[of("a", "notifying", 1100)] * 4, now=2000, retry=True) == []
    assert due(now=5000, retry=True) == [], "old news"


def test_no_part_of_an_address_is_shown() -> None:
    said = "No route to hooks.example.org: /T1A2/s%40cret refused s@cret of user"
    shown = without_address(said, "json://user:s%40cret@hooks.example.org/T1A2?key=value")
    assert shown == "No route to ***: /***/*** refused *** of ***"
