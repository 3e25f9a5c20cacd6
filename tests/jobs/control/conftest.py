"""An attempt that a coordinator decides about."""

import pytest
from support.reported_nodes import AttemptMaker, Clock, CoordinatedAttempt

from jobs.node_attempt import NodeAttempt


@pytest.fixture
def attempt(node: NodeAttempt, monkeypatch: pytest.MonkeyPatch) -> AttemptMaker:
    """Makes one; its arguments are those of CoordinatedAttempt."""
    clock = Clock(monkeypatch)
    return lambda *events, of=node, **spec: CoordinatedAttempt(of, clock, *events, **spec)
