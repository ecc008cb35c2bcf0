"""`make soak`: the whole campaign, once a seed. Ends with 1 if anything was wrong."""

import argparse
import sys

from tests.soak.campaign import Outcome, Plan, run
from tests.soak.real import run_real


def main() -> int:
    """Run the campaigns that the command line asks for, and print what they did."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--tickets", type=int, default=52_000)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=100.0, help="how long tickets and faults come")
    parser.add_argument("--real", action="store_true", help="afterwards, the real model with kills")
    asked = parser.parse_args()
    bad = 0
    for seed in asked.seeds:
        print(f"seed {seed}: {asked.tickets:,} tickets, {asked.workers} workers, {asked.seconds:.0f} s of faults")
        outcome = run(Plan(asked.tickets, asked.workers, asked.seconds, seed), tell)
        bad += bool(outcome.faults)
        show(outcome)
    if asked.real:
        print("the real model, killed and replaced")
        outcome = run_real(asked.seeds[0])
        bad += bool(outcome.faults)
        show(outcome)
    return 1 if bad else 0


def tell(line: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def show(outcome: Outcome) -> None:
    """The figures, then what was wrong."""
    for name, value in outcome.figures.items():
        print(f"  {name:<48} {value:>10,}")
    for fault in outcome.faults[:50]:
        print(f"  WRONG: {fault}")
    print("  all promises kept" if not outcome.faults else f"  {len(outcome.faults)} faults")


if __name__ == "__main__":
    sys.exit(main())
