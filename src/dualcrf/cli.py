"""The command `dualcrf`. A subcommand is a function that declares arguments and names the one that runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualcrf.solver.search import Progress
    from dualcrf.solver.solution import Solution

EXIT_CODES = """exit codes:
  0    a labelling was found
  1    no labelling was found: all are forbidden, or none was met within the budget
  2    the arguments are wrong
  3    the file cannot be read or written
  130  interrupted; the best labelling so far has been printed"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dualcrf", description="Certified inference in conditional random fields.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for declare in COMMANDS:
        declare(subparsers)
    given = parser.parse_args(arguments)
    return given.run(given)


def _declare_solve(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "solve",
        help="the best labelling of a model, with a bound on how far from optimal it can be",
        description="Find the labelling of a model with the highest score, and a bound that none exceeds.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a UAI MARKOV file (.gz and .xz too) or a grid's .npz")
    parser.add_argument("--gamma", type=_number(0), default=0.0, help="smoothing of the dual (default: 0, the hard max)")
    parser.add_argument("--schedule", choices=("wavefront", "handover", "parallel"), default="wavefront")
    parser.add_argument("--iterations", type=int, metavar="N", help="the most sweeps or updates")
    parser.add_argument("--tol", type=_number(0), metavar="T", help="stop at a gap of T times the score")
    parser.add_argument("--time-limit", type=_number(0), metavar="SECONDS", help="stop after so long with the best so far")
    parser.add_argument("--out", type=Path, metavar="LABELS", help="write the labels to this file, one line a node")
    parser.add_argument("--json", action="store_true", help="print one JSON object, labels included")
    parser.add_argument("--impl", choices=("auto", "reference", "cpu", "triton"), default="auto")
    parser.set_defaults(run=_solve)


COMMANDS: tuple[Callable[[argparse._SubParsersAction], None], ...] = (_declare_solve,)


def _number(least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected a number of at least {least:g}")
        return value

    return number


def _solve(given: argparse.Namespace) -> int:
    from dualcrf.files import read_model
    from dualcrf.solver.solve import solve

    begun = monotonic()
    optional = {"iterations": given.iterations, "tol": given.tol}
    try:
        model = read_model(given.file)
        solution = solve(
            model.unary, model.pairwise, model.graph,
            gamma=given.gamma, schedule=given.schedule, time_limit=given.time_limit, impl=given.impl,
            callback=_progress_line() if sys.stderr.isatty() else None,
            **{name: value for name, value in optional.items() if value is not None},
        )  # fmt: skip
        if given.out is not None:
            given.out.write_text("".join(f"{label}\n" for label in solution.labels.tolist()))
    except OSError as error:
        print(f"dualcrf: {error}", file=sys.stderr)
        return 3
    except ValueError as error:
        print(f"dualcrf: {error}", file=sys.stderr)
        return 3 if type(error).__name__ == "ModelFileError" else 2
    except KeyboardInterrupt:
        print("dualcrf: interrupted before there was a labelling", file=sys.stderr)
        return 130
    _print(solution, monotonic() - begun, given.json)
    if solution.status == "interrupted":
        return 130
    return 0 if math.isfinite(float(solution.primal)) else 1


def _progress_line() -> Callable[[Progress], None]:
    """Writes over one line of a terminal, a few times a second."""
    last = -math.inf

    def show(progress: Progress) -> None:
        nonlocal last
        if progress.seconds - last < 0.2:
            return
        last = progress.seconds
        dual, primal = float(progress.dual), float(progress.primal)
        state = f"dual {dual:.8g}, primal {primal:.8g}, gap {dual - primal:.3g}"
        line = f"{progress.iterations} iterations, {progress.seconds:.1f} s: {state}"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    return show


def _print(solution: Solution, seconds: float, as_json: bool) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    result = {
        "primal": float(solution.primal),
        "dual": float(solution.dual),
        "gap": float(solution.gap),
        "iterations": int(solution.iterations),
        "status": solution.status,
        "seconds": round(seconds, 3),
    }
    if as_json:
        # JSON has no infinities.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
        print(json.dumps({"labels": solution.labels.tolist(), **finite}))
    else:
        for name, value in result.items():
            print(f"{name:10} {value:.10g}" if isinstance(value, float) else f"{name:10} {value}")


if __name__ == "__main__":
    sys.exit(main())
