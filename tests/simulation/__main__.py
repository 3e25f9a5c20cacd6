"""`python -m tests.simulation --seed 123`: what happens in one schedule; `--seeds 1000`: whether all of them hold."""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation import cluster, commands, fixes, known, schedule

_ORDER = "PYTHONHASHSEED"


def violations_of(what: tuple[str | None, int]) -> tuple[str, tuple[str, ...]]:
    """Return what the schedule of a seed, or a known one with this seed, violates."""
    name, seed = what
    return f"{name or ''} seed {seed}".strip(), schedule.run(_plan(name, seed)).violations


def _plan(name: str | None, seed: int) -> schedule.Plan:
    return replace(known.KNOWN[name], seed=seed) if name else schedule.plan_of(seed)


def main() -> int:
    """Run one schedule, or many. Returns 1 if one of them violates something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="print the timeline of one schedule, and shrink it if it fails")
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules to run")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument(
        "--known",
        nargs="?",
        const="",
        metavar="TEXT",
        help="run the schedules of known defects (those with TEXT in their name) with these seeds",
    )
    parser.add_argument("--commands", action="store_true", help="print what Slurm's commands lead to, as JSON")
    parser.add_argument("--until-first", action="store_true", help="stop at the first schedule that fails")
    parser.add_argument(
        "--without-fixes",
        nargs="?",
        const="",
        metavar="TEXT",
        help="take one fix after the other out of the product (those with TEXT in their name), and show what is found",
    )
    options = parser.parse_args()
    if os.environ.get(_ORDER) != "0":
        # The order of sets depends on it.
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, _ORDER: "0"}
        )
    if options.without_fixes is not None:
        chosen = (f"--seeds={options.seeds}", f"--first={options.first}")
        return int(bool(fixes.table(*chosen, only=options.without_fixes)))
    cluster.install()
    if options.commands:
        print(json.dumps(commands.simulated()))
        return 0
    names = [None] if options.known is None else [name for name in known.KNOWN if options.known in name]
    if options.seed is not None:
        return max(_show(name, options.seed) for name in names)
    seeds = range(options.first, options.first + options.seeds)
    work = [(name, seed) for name in names for seed in seeds]
    began, failed = time.perf_counter(), 0
    with Pool() as pool:
        for what, violations in pool.imap_unordered(violations_of, work, 8):
            if violations:
                failed += 1
                print(f"{what}: {violations[0]}", flush=True)
                if options.until_first:
                    return 1
    print(f"{len(work)} schedules in {time.perf_counter() - began:.0f} s, {failed} failed; seeds from {options.first}")
    return int(bool(failed))


def _show(name: str | None, seed: int) -> int:
    outcome = schedule.run(_plan(name, seed))
    if outcome.violations and name is None:
        outcome = schedule.shrunk(outcome)
    print(outcome.plan)
    print("\n".join(outcome.timeline))
    print(f"{outcome.state} after {outcome.seconds:.0f} s")
    for violation in outcome.violations:
        print(f"violated: {violation}")
    return int(bool(outcome.violations))


if __name__ == "__main__":
    sys.exit(main())
