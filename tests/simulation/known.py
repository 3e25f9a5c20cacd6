"""Defects of the recovery, each as the smallest schedule that showed it, or shows it when its fix is taken out."""

from dataclasses import replace
from typing import Any

from support.events import recovery_of, resources_of

from simulation.ranks import Training
from simulation.schedule import Fault, Plan
from simulation.slurm import Configuration

_CLUSTER = Configuration(nodes=("gpu01", "gpu02", "gpu03", "gpu04"), slurmd_timeout=60.0, requeue_delay=30.0)
_TRAINING = Training(total_steps=30, step_seconds=1.0, snapshot_steps=1, checkpoint_steps=10)
_NEWER = {"has_delay_setting": True}
_STARTS, _TRAINS, _DONE = "job 1 starts", "the ranks of attempt 1, round 1, begin", "has done all steps"


def _plan(*faults: Fault, nodes: str = "2", time: str = "600m", configuration: Any = None, **plan: Any) -> Plan:
    usual = Plan(
        seed=1, configuration=replace(_CLUSTER, **(configuration or {})), training=_TRAINING,
        resources=resources_of(nodes=nodes, partition="gpu", time=time), recovery=recovery_of(hang_timeout="10s"),
        is_script=True, has_supervisor=False, faults=faults, is_helped=False,
    )  # fmt: skip
    return replace(usual, **plan)


def _kill_host(at: float, after: str = "", host: str = "gpu01") -> Fault:
    return Fault(at=at, after=after, kind="kill-host", host=host)


KNOWN = {
    # --- found by the simulation ---
    # The last resort took a recorded end for the proof that the run goes on.
    "the agent that has recorded the end of a job of one node is killed": _plan(
        Fault(at=10.0, after=_TRAINS, kind="signal"),
        Fault(at=0.0, after="attempt 1 ended: time_limit", kind="kill-agent", host="gpu01"), nodes="1", attempts=2,
    ),
    # The agents took the end of the job for a cancellation, and nothing continued the run.
    "the batch script is killed": _plan(Fault(at=20.0, kind="kill-script")),
    # Agents took KillWait for Slurm's default, and waited for ranks until Slurm killed them all.
    "a job is preempted while its ranks start, and KillWait is short": _plan(
        Fault(at=2.0, after=_STARTS, kind="preempt"), attempts=2,
        configuration={"preempt_mode": "CANCEL", "grace_seconds": 0.0, "kill_wait": 5.0},
    ),
    # The hang counted as part of the loss, though the ranks went on. So the job waited until its time limit.
    "ranks hang, and a node is out of reach for a moment": _plan(
        Fault(at=10.0, after=_TRAINS, kind="hang", host="gpu02"),
        Fault(at=2.0, after="fails: hang", kind="suspend", host="gpu02", seconds=6.0),
    ),
    # The job that an agent submitted after `hpc cancel` had looked for jobs waited in the queue.
    "a run is cancelled just before its next job is submitted": _plan(
        Fault(at=10.0, after=_TRAINS, kind="isolate", host="gpu02", seconds=60.0),
        Fault(at=0.1, after="attempt 1 ended: node_failure", kind="cancel"),
        _kill_host(10.0, after="hpc cancel has ended"),
        configuration={"nodes": ("gpu01", "gpu02", "gpu03"), "slurmd_timeout": 300.0},
    ),
    # Nobody recorded the end, so that no message told of it.
    "the agents are killed when the trainer has finished": _plan(
        Fault(at=1.0, after=_DONE, kind="doom-agent", host="gpu01", number=1), is_script=False, notifies=True,
        nodes="1", has_supervisor=True,
    ),
    # No message told of its completion either, because its time was that of the record.
    "a job is killed in the moment of its completion": _plan(
        Fault(at=5.0, after=_TRAINS, kind="lost-reply"), Fault(at=1.5, after=_DONE, kind="preempt"),
        is_script=False, notifies=True, has_supervisor=True,
        configuration={"preempt_mode": "CANCEL", "grace_seconds": 0.0, "kill_wait": 5.0},
    ),
    # The steps since the first node's last snapshot were done again, though another node had them.
    "the first node's GPU is dead, and then another node dies": _plan(
        Fault(at=10.0, after=_TRAINS, kind="device", host="gpu01"),
        _kill_host(10.0, "round 2, begin", "gpu02"), nodes="2:3",
    ),
    # The old job stayed until its time limit, without a process, on nodes for which the next one waited.
    "the first node dies before it has ended the job that it replaced": _plan(
        _kill_host(10.0, _TRAINS, "gpu03"), _kill_host(0.1, "job 2 is submitted"), nodes="3",
        configuration={"nodes": ("gpu01", "gpu02", "gpu03", "gpu04", "gpu05"), "slurmd_timeout": 300.0},
    ),
    # The other agents left, and deleted their snapshots, before the first node's agent had saved its own.
    "a rank has failed, the job is preempted, and the first node dies": _plan(
        Fault(at=5.0, after=_TRAINS, kind="oom", host="gpu03"), Fault(at=2.0, after="fails: oom", kind="preempt"),
        _kill_host(0.6, "out_of_memory: rank"), nodes="3",
        configuration={"grace_seconds": 20.0, "slurmd_timeout": 20.0},
    ),
    # Slurm requeued the first job before its agents could end it; it made one more attempt of a run that had failed.
    "a job that was replaced starts again when the run has failed": _plan(
        Fault(at=5.0, after=_TRAINS, kind="preempt"), Fault(at=0.05, after="job 2 is submitted", kind="kill-script"),
        Fault(at=0.0, after="job 2 is submitted", kind="kill-agent", host="gpu01"),
        *[Fault(at=0.0, after="the ranks of attempt 2", kind="crash", host="gpu03")] * 3,
        attempts=2, configuration={"grace_seconds": 20.0},
    ),
    # That job also trained once more if the other one had completed the script.
    "a job that was replaced starts again when the script is complete": _plan(
        Fault(at=5.0, after=_TRAINS, kind="preempt"), Fault(at=0.05, after="job 2 is submitted", kind="kill-script"),
        Fault(at=0.0, after="job 2 is submitted", kind="kill-agent", host="gpu01"),
        configuration={"requeue_delay": 120.0, "grace_seconds": 20.0},
    ),
    # Slurm refused to change the pending job, which started before it was replaced; its attempt counted as cancelled.
    "the supervisor replaces a job that starts at this moment": _plan(
        _kill_host(15.5, _TRAINS, "gpu03"), Fault(at=20.0, after=_TRAINS, kind="refuse-update"),
        nodes="3", has_supervisor=True, configuration={"slurmd_timeout": 20.0},
    ),
    # It did not know the nodes that the job excludes, and let it wait for others.
    "the supervisor's sbatch is carried out, and its reply is lost": _plan(
        _kill_host(5.0, _TRAINS, "gpu02"), _kill_host(18.0, _TRAINS),
        Fault(at=57.0, after=_TRAINS, kind="lost-submission"),
        Fault(at=1.0, after="its reply is lost", kind="controller-away", seconds=90.0),
        Fault(at=60.0, after="gpu01 dies", kind="revive", host="gpu01"),
        has_supervisor=True, nodes="1:2", configuration={"nodes": ("gpu01", "gpu02"), "slurmd_timeout": 300.0},
    ),
    # The supervisor let its job wait for ever, held.
    "Slurm does not let an expedited job fail": _plan(
        Fault(at=0.0, after=_TRAINS, kind="refuse-update", seconds=300.0),
        *(Fault(at=20.0, kind="killed", host=f"gpu0{1 + number % 2}") for number in range(7)),
        training=replace(_TRAINING, snapshot_steps=1000, checkpoint_steps=1000), attempts=1, has_supervisor=True,
        configuration={**_NEWER, "expedites": True},
    ),
    # It waited for ever for a node that it excluded, though that one was free.
    "Slurm requeues an expedited job of which the supervisor must allow more nodes": _plan(
        Fault(at=10.0, after=_TRAINS, kind="kill-agent", host="gpu01"),
        _kill_host(10.0, "the ranks of attempt 2", "gpu02"), nodes="1", has_supervisor=True,
        configuration={**_NEWER, "expedites": True, "nodes": ("gpu01", "gpu02"), "slurmd_timeout": 20.0},
    ),
    # The last resort recorded that the run had been cancelled.
    "the supervisor replaces a job whose agents were killed on a full disk": _plan(
        Fault(at=0.4, kind="full", seconds=60.0), Fault(at=1.0, kind="refuse-sbatch"),
        Fault(at=40.0, kind="kill-agent", host="gpu01"), has_supervisor=True,
    ),
    # The agents waited for 15 minutes for Slurm to mark a node down that was alive, and gave up.
    "a node is cut off for seconds, its agent is killed, and Slurm refuses a new job": _plan(
        Fault(at=0.0, after=_TRAINS, kind="refuse-sbatch"),
        Fault(at=5.0, after=_TRAINS, kind="cut-one-way", host="gpu02", seconds=30.0),
        Fault(at=10.0, after=_TRAINS, kind="kill-agent", host="gpu02"),
        configuration={"nodes": ("gpu01", "gpu02", "gpu03")},
    ),
    # The batch script left the next job to the agent that had claimed it, but that agent was dead.
    "a node is cut off, and its agent is killed after it has claimed the next job": _plan(
        Fault(at=0.0, after=_TRAINS, kind="refuse-sbatch"),
        Fault(at=5.0, after=_TRAINS, kind="cut-one-way", host="gpu02", seconds=30.0),
        Fault(at=20.0, after=_TRAINS, kind="kill-agent", host="gpu02"),
        configuration={"nodes": ("gpu01", "gpu02", "gpu03")},
    ),
    # `hpc cancel` did nothing, because the run was cancelled still, and then the resumed run trained.
    "a run is cancelled while it is being resumed": _plan(
        Fault(at=10.0, after=_TRAINS, kind="cancel"), Fault(at=10.0, after=_TRAINS, kind="lost-reply"),
        Fault(at=1.0, after=_TRAINS, kind="resume"), Fault(at=10.0, after=_TRAINS, kind="cancel"),
        training=replace(_TRAINING, total_steps=200),
    ),
    # `hpc resume` took back the second cancellation, too.
    "a run is cancelled again while `hpc resume` waits": _plan(
        _kill_host(6.8), Fault(at=14.2, kind="cancel"), Fault(at=15.5, kind="resume"), Fault(at=31.9, kind="cancel"),
        nodes="3", training=replace(_TRAINING, total_steps=200),
        configuration={"nodes": ("gpu01", "gpu02", "gpu03", "gpu04", "gpu05")},
    ),
    # The first node had no part in the round, and the live node left the saving to the lost one, which came first.
    "the first member of a round without the first node is lost before a preemption": _plan(
        Fault(at=10.0, after=_TRAINS, kind="device", host="gpu01"), _kill_host(30.0, _TRAINS, "gpu02"),
        Fault(at=40.0, after=_TRAINS, kind="preempt"), nodes="2:3", training=replace(_TRAINING, total_steps=200),
    ),
    # They took it for a cancellation again: Slurm 26.05 has another word for it.
    "the batch script is killed, on Slurm 26.05": _plan(Fault(at=20.0, kind="kill-script"), configuration=_NEWER),
    # Its job stayed in the queue, held.
    "a run fails whose job is expedited": _plan(
        *(Fault(at=20.0, kind="killed", host=f"gpu0{1 + number % 2}") for number in range(7)),
        training=replace(_TRAINING, snapshot_steps=1000, checkpoint_steps=1000), attempts=1,
        configuration={**_NEWER, "expedites": True},
    ),
    # Its job could not be requeued a second time.
    "an expedited job is requeued and then loses its node": _plan(
        Fault(at=10.0, after=_TRAINS, kind="signal"),
        Fault(at=10.0, after="the ranks of attempt 2, round 1, begin", kind="kill-host", host="gpu01"), nodes="1",
        configuration={**_NEWER, "expedites": True, "nodes": ("gpu01", "gpu02")}, attempts=3,
    ),
    # Its user got no message: of its end, or that it was cancelled.
    "a run is cancelled in the moment of its completion": _plan(
        Fault(at=0.0, after=_DONE, kind="cancel"), is_script=False, notifies=True, has_supervisor=True,
    ),
    # Its job went on without a single process until its time limit.
    "the first node dies between the last step and the record of the end": _plan(_kill_host(0.9, _DONE)),
    # The same: the other agents only said that they could not reach the first node's.
    "the first node dies before the others have reached it": _plan(_kill_host(1.0)),
    # The other agents deleted their snapshots, because the job was ending.
    "the job is requeued while its first node is dead": _plan(_kill_host(20.0), Fault(at=22.0, kind="requeue")),
    # A job that started while its storage failed was over at once, and the run with it.
    "the storage fails while the agents start": _plan(
        Fault(at=0.4, kind="storage-fails", host="gpu01", seconds=40.0), nodes="1", attempts=1
    ),
    # The ranks that agents kill for a pause counted as a further failure, and used up the budget.
    "two failures without progress": _plan(
        Fault(at=18.0, kind="killed", host="gpu02"), Fault(at=19.0, kind="crash", host="gpu01"), interruptions=2
    ),
    # The agents waited for 15 minutes for Slurm to mark a node down that had come back.
    "the first node is rebooted before it counts as down": _plan(
        Fault(at=0.0, after=_TRAINS, kind="refuse-sbatch"), _kill_host(10.0, _TRAINS),
        Fault(at=25.0, after=_TRAINS, kind="revive", host="gpu01"), configuration={"slurmd_timeout": 300.0},
    ),
    # The job was requeued, though it had a dead node.
    "a node dies before it joins, and the time limit comes": _plan(
        _kill_host(0.0, _STARTS, "gpu02"), time="2m", configuration={"slurmd_timeout": 300.0, "requeue_delay": 5.0}
    ),
    # The end of a script could not be recorded, so that it trained again.
    "the storage is full when the script ends": _plan(Fault(at=0.1, after=_DONE, kind="full", seconds=8.0), nodes="1"),
    # Its agents and the batch script failed at once, and nothing continued the run.
    "the storage fails when the script ends": _plan(
        Fault(at=0.5, after=_DONE, kind="storage-fails", host="gpu01", seconds=3.0), nodes="1"
    ),
    # The job was requeued when Slurm had marked one of two dead nodes down.
    "a second node dies while the agents wait for Slurm": _plan(
        Fault(at=0.0, after=_TRAINS, kind="refuse-sbatch"), _kill_host(10.0, _TRAINS),
        _kill_host(80.0, _TRAINS, "gpu03"), nodes="3", configuration={"slurmd_timeout": 300.0},
    ),
    # The agents waited for 15 minutes for Slurm to mark a node down on which only the agent had ended.
    "Slurm refuses the new job after an agent was killed": _plan(
        Fault(at=0.0, after=_TRAINS, kind="refuse-sbatch"),
        Fault(at=10.0, after=_TRAINS, kind="kill-agent", host="gpu02"), attempts=2,
    ),
    # The first node's agent, which waited for Slurm, did not see that the other node died, and requeued the job.
    "a node dies while Slurm does not answer at the end": _plan(
        Fault(at=5.0, after=_TRAINS, kind="controller-away", seconds=80.0),
        Fault(at=10.0, after=_TRAINS, kind="signal"),
        _kill_host(5.0, "attempt 1 ended", "gpu02"), configuration={"slurmd_timeout": 300.0},
        recovery=recovery_of(hang_timeout="10s", continue_with="requeue"),
    ),
    # --- found before ---
    "all agents are killed": _plan(Fault(at=20.0, kind="kill-agent", host="gpu01"), nodes="1"),
    "the first node dies before its agent starts": _plan(_kill_host(0.0, _STARTS)),
    "Slurm refuses the requeue": _plan(
        Fault(at=0.0, after=_TRAINS, kind="refuse-requeue"), Fault(at=10.0, after=_TRAINS, kind="signal", host="gpu01"),
    ),
    "a GPU is dead": _plan(Fault(at=10.0, after=_TRAINS, kind="device", host="gpu02")),
    "the storage is full when the agents start": _plan(Fault(at=0.4, kind="full", seconds=40.0), nodes="1"),
    "a job is requeued by hand": _plan(Fault(at=10.0, after=_TRAINS, kind="requeue"), attempts=2),
    "the answer to sbatch is lost": _plan(
        Fault(at=0.0, after=_TRAINS, kind="lost-submission"), _kill_host(10.0, _TRAINS), attempts=2,
        configuration={"slurmd_timeout": 300.0},
    ),
    "the first node is cut off": _plan(
        Fault(at=10.0, after=_TRAINS, kind="isolate", host="gpu01", seconds=150.0), nodes="2:3",
        training=replace(_TRAINING, total_steps=200), recovery=recovery_of(hang_timeout="10s", elastic=True),
    ),
    "a first node that is cut off trains alone": _plan(
        Fault(at=10.0, after=_TRAINS, kind="isolate", host="gpu01", seconds=150.0), nodes="1:3",
        training=replace(_TRAINING, total_steps=200),
    ),
    "the first node is suspended and cut off": _plan(
        Fault(at=10.0, after=_TRAINS, kind="suspend", host="gpu01", seconds=80.0),
        Fault(at=0.0, after=_TRAINS, kind="isolate", host="gpu01", seconds=240.0), nodes="1:3",
        training=replace(_TRAINING, total_steps=300, checkpoint_steps=5), configuration={"slurmd_timeout": 300.0},
    ),
    "another node is cut off": _plan(
        Fault(at=10.0, after=_TRAINS, kind="cut", host="gpu03", seconds=80.0), nodes="2:3",
        training=replace(_TRAINING, total_steps=200), attempts=1,
    ),
    "the first node is suspended": _plan(
        Fault(at=10.0, after=_TRAINS, kind="suspend", host="gpu01", seconds=20.0), nodes="3",
        attempts=1, interruptions=0, configuration={"nodes": ("gpu01", "gpu02", "gpu03")},
    ),
    "the agent that has recorded the end dies": _plan(
        _kill_host(10.0, _TRAINS), _kill_host(1.3, "lost contact with gpu01", "gpu02"),
        nodes="3", configuration={"nodes": ("gpu01", "gpu02", "gpu03", "gpu04", "gpu05", "gpu06")},
    ),
    "Slurm is away while the first node is lost and the supervisor runs": _plan(
        _kill_host(10.0, _TRAINS), Fault(at=2.0, after="gpu01 dies", kind="controller-away", seconds=60.0),
        has_supervisor=True, attempts=2,
    ),
    "the agent that has submitted the next job dies": _plan(
        _kill_host(10.0, _TRAINS), Fault(at=0.0, after="job 2 is submitted", kind="kill-agent", host="gpu02"),
        has_supervisor=True, attempts=2, training=replace(_TRAINING, total_steps=300),
    ),
    "ranks fail on both nodes": _plan(
        Fault(at=20.0, kind="killed", host="gpu01"), nodes="3", attempts=1, interruptions=1
    ),
    "a clock is set back": _plan(
        Fault(at=10.0, after=_TRAINS, kind="crash", host="gpu01"),
        Fault(at=0.5, after="fails: crash", kind="clock", host="gpu01", seconds=7200.0, number=1),
        Fault(at=0.5, after="fails: crash", kind="clock", host="gpu02", seconds=7200.0, number=1),
        Fault(at=9.0, after="fails: crash", kind="hang", host="gpu01"), attempts=1, interruptions=2,
    ),
    "a run is cancelled while its job waits": _plan(
        Fault(at=10.0, after=_TRAINS, kind="preempt"), Fault(at=15.0, after="is preempted", kind="cancel"),
        has_supervisor=True, recovery=recovery_of(hang_timeout="10s", continue_with="requeue"), attempts=1,
    ),
    "a run is cancelled while Slurm is away": _plan(
        Fault(at=9.0, after=_TRAINS, kind="controller-away", seconds=60.0),
        Fault(at=10.0, after=_TRAINS, kind="cancel"), has_supervisor=True,
    ),
    "a run is cancelled while its nodes are cut off": _plan(
        Fault(at=9.0, after=_TRAINS, kind="isolate", host="gpu01", seconds=150.0),
        Fault(at=10.0, after=_TRAINS, kind="cancel"), nodes="1", training=replace(_TRAINING, total_steps=200),
    ),
    "all agents are killed twice": _plan(
        Fault(at=10.0, after=_TRAINS, kind="kill-agent", host="gpu01"),
        Fault(at=10.0, after="the ranks of attempt 2, round 1, begin", kind="kill-agent", host="gpu02"),
        nodes="1", attempts=3,
    ),
    "four failures without progress": _plan(
        *(Fault(at=20.0, kind="killed", host=f"gpu0{1 + number % 2}") for number in range(4)),
        training=replace(_TRAINING, snapshot_steps=1000, checkpoint_steps=1000), attempts=1, outcome="completed",
    ),
    "the first node is lost while another run waits": _plan(_kill_host(10.0, _TRAINS), next_run="after", attempts=2),
    "a job that waits cannot be told of the next one": _plan(
        Fault(at=0.0, after=_TRAINS, kind="refuse-update"), _kill_host(10.0, _TRAINS),
        next_run="after_ok", attempts=2, configuration={"slurmd_timeout": 20.0},
    ),
    "a run loses its job while another one waits, and is cancelled": _plan(
        Fault(at=0.1, after=_STARTS, kind="kill-script"), Fault(at=20.0, after=_STARTS, kind="cancel"),
        next_run="after",
    ),
    "the job of a bad node is preempted": _plan(
        Fault(at=10.0, after=_TRAINS, kind="device", host="gpu01"),
        Fault(at=2.5, after="fails: device", kind="preempt"),
        nodes="1", configuration={"preempt_mode": "CANCEL", "grace_seconds": 0.0, "kill_wait": 5.0}, is_script=False,
        has_supervisor=True, training=replace(_TRAINING, checkpoint_steps=1000),
    ),
    "a run must be complete before another one, whose agents are killed": _plan(
        Fault(at=10.0, after=_TRAINS, kind="cancel"), Fault(at=0.1, after="job 2 starts", kind="preempt"),
        next_run="after_ok",
    ),
}  # fmt: skip
"""What goes wrong, and the schedule."""
