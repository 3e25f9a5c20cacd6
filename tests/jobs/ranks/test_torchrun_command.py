from dataclasses import replace

from jobs.ranks.rank_environment import torchrun_environment
from jobs.ranks.torchrun import Rendezvous, torchrun_argv

MEETING = Rendezvous(run="r", attempt=1, secret="n", round=1, num_nodes=2, host="10.0.0.2", port=12345, node=0)


def test_the_secret_is_in_torchruns_environment_and_not_in_its_arguments() -> None:
    rendezvous = replace(MEETING, secret="5ecret")
    assert "5ecret" not in " ".join(torchrun_argv(rendezvous, 4, "10.0.0.1", "python", ["program"]))
    assert "5ecret" in torchrun_environment(rendezvous, {"HOME": "/"}).values()


def test_ipv6_addresses_are_in_brackets_for_torchrun() -> None:
    assert "--rdzv-endpoint=[fd77::2]:12345" in torchrun_argv(
        replace(MEETING, host="fd77::2"), 1, "::1", "python", ["p"]
    )


def test_ports_of_a_range() -> None:
    argv = torchrun_argv(replace(MEETING, ports=range(23_000, 23_020)), 1, "10.0.0.1", "python", ["p"])
    assert "--rdzv-conf=rank=0,ports=23000-23019" in argv
