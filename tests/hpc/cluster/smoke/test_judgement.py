"""What `hpc smoke` calls slow, and what it says has changed."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpc.base.node_info import AllReduceSpeed, NodeInfo, PairSpeed, RankSpeed
from hpc.cluster.smoke.judgement import changes, judge
from hpc.cluster.smoke.measurements import SmokeResult, document_of, keep, newest, result_of

NODES = ("a", "b", "c", "d")


def node(name: str, **changed: Any) -> NodeInfo:
    usual = NodeInfo(
        name=name, cpu="EPYC", cpus=64, memory_bytes=2**38, kernel="6.1", gpus=("H200",) * 2, driver="550.54",
        stage_dir="/tmp", stage_type="xfs", stage_free_bytes=10**12, write_bytes_per_second=2e9,
        staged_bytes_per_second=1e9, clock_seconds=0.0,
    )  # fmt: skip
    return replace(usual, **changed)


def rank(name: str, local_rank: int, teraflops: float = 700.0, copies: float = 50.0) -> RankSpeed:
    return RankSpeed(
        rank=2 * NODES.index(name) + local_rank, local_rank=local_rank, node=name, device="H200", teraflops=teraflops,
        host_to_device_gb_per_second=copies,
    )  # fmt: skip


def pair(first: str, second: str, rate: float = 20.0, latency: float = 2e-5) -> PairSpeed:
    return PairSpeed(nodes=(first, second), latency_seconds=latency, gb_per_second=rate)


def result(**changed: Any) -> SmokeResult:
    pairs = [pair(a, b) for number, a in enumerate(NODES) for b in NODES[number + 1 :]]
    ranks = [rank(name, local_rank) for name in NODES for local_rank in range(2)]
    usual = SmokeResult(
        time=1.0, partition="gpu", asked_nodes=4, nodes=tuple(map(node, NODES)), ranks=tuple(ranks),
        all_reduce=(AllReduceSpeed(message_bytes=1024, seconds=1e-4, gb_per_second=0.02),), pairs=tuple(pairs),
    )  # fmt: skip
    return replace(usual, **changed)


def with_pairs(*slow: PairSpeed) -> SmokeResult:
    """The usual result with some pairs replaced."""
    replaced = {one.nodes: one for one in slow}
    return result(pairs=tuple(replaced.get(one.nodes, one) for one in result().pairs))


# A single pair or node has no median.
ALONE = result(asked_nodes=1, nodes=(node("a"),), ranks=(rank("a", 0),), pairs=(), all_reduce=())


@pytest.mark.parametrize(
    ("measured", "slow"),
    [
        (result(), []),
        (ALONE, []),
        (replace(ALONE, asked_nodes=2, nodes=(node("a"), node("b")), pairs=(pair("a", "b", rate=0.1),)), []),
        (with_pairs(pair("b", "d", rate=5.0)), ["b - d"]),
        (with_pairs(pair("b", "d", latency=0.02)), ["b - d"]),
        (with_pairs(*(pair(*one, rate=5.0) for one in (("a", "c"), ("b", "c"), ("c", "d")))), ["c"]),
        (result(ranks=(*result().ranks[:3], rank("b", 1, teraflops=600.0), *result().ranks[4:])), ["b GPU 1"]),
        (result(ranks=(*result().ranks[:3], rank("b", 1, copies=12.0), *result().ranks[4:])), ["b GPU 1"]),
        (result(nodes=(*map(node, NODES[:3]), node("d", write_bytes_per_second=3e8))), ["d"]),
        (result(nodes=(*map(node, NODES[:3]), node("d", staged_bytes_per_second=1e8))), ["d"]),
        (result(nodes=(*map(node, NODES[:3]), node("d", clock_seconds=-2.5))), ["d"]),
        (result(nodes=(*map(node, NODES[:3]), node("d", problem="its GPU 1 computes wrongly"))), ["d"]),
        (result(nodes=tuple(map(node, NODES[:3]))), ["partition gpu"]),
    ],
)
def test_what_is_slow_is_named(measured: SmokeResult, slow: list[str]) -> None:
    assert [one.where for one in judge(measured)] == slow


def test_the_better_half_is_the_measure_when_half_is_slow() -> None:
    """Of four nodes, one that is slow with all others makes half of the pairs slow."""
    found = judge(with_pairs(*(pair(*one, rate=5.0) for one in (("a", "d"), ("b", "d"), ("c", "d")))))
    assert [(one.where, one.what) for one in found] == [
        ("d", "with every other node it sends 5 GB/s, the median is 20")
    ]


def test_kept_result_is_read_back_and_what_has_changed_is_found(tmp_path: Path) -> None:
    before = result_of(
        [node("a", ranks={"ranks": [asdict(rank("a", 0))], "pairs": [], "all_reduce": []}), node("b")], "gpu", 2
    )
    assert newest(tmp_path) is None
    path = keep(before, tmp_path)
    kept = newest(tmp_path)
    assert kept is not None
    assert document_of(kept) == document_of(before)
    path.with_name("smoke-99999999-000000.json").write_text("{}")
    assert newest(tmp_path) == kept, "what is damaged is no result"
    assert changes(before, before) == []
    now = replace(before, nodes=(node("a", driver="570.1", gpus=("H200",)), node("c")), ranks=(rank("a", 0, 400.0),))
    assert [(one.where, one.what, one.before, one.now) for one in changes(before, now)] == [
        ("a", "gpus", "H200, H200", "H200"),
        ("a", "driver", "550.54", "570.1"),
        ("a GPU 0", "computes", "700 TFLOP/s", "400 TFLOP/s"),
    ]
    assert "ranks" not in document_of(before)["nodes"][0]


# As kept by Torchrelay 0.2.0.
OLD = """{"time": 1.0, "partition": "gpu", "asked_nodes": 2, "nodes": [{"name": "a", "cpu": "EPYC", "cpus": 64,
 "memory_bytes": 274877906944, "kernel": "6.1", "gpus": ["H200"], "driver": "550.54", "stage_dir": "/tmp",
 "stage_type": "xfs", "stage_free_bytes": 1000000000000, "write_bytes_per_second": 2e9, "staged_bytes_per_second": 1e9,
 "staging_problem": "", "clock_seconds": 0.0, "problem": ""}], "ranks": [{"rank": 0, "local_rank": 0, "node": "a",
 "device": "H200", "teraflops": 700.0, "host_to_device_gb_per_second": 50.0}], "all_reduce": [{"message_bytes": 1024,
 "seconds": 0.0001, "gb_per_second": 0.02}], "pairs": [{"nodes": ["a", "b"], "latency_seconds": 2e-05,
 "gb_per_second": 20.0}]}"""


def test_result_of_an_older_version_is_compared(tmp_path: Path) -> None:
    (tmp_path / "smoke-20261101-000000.json").write_text(OLD)
    before = newest(tmp_path)
    assert before is not None
    assert json.loads(json.dumps(document_of(before))) == json.loads(OLD)
    assert [one.what for one in changes(before, result(pairs=(pair("a", "b", rate=5.0),)))] == ["gpus", "sends"]
