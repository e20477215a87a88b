"""`solve` on benchmark models: energy, bound, gap and seconds beside the published figures.

    python benchmarks/bench_solve.py [MODEL ...]

Two image models of the Middlebury benchmark, whose energies are costs, and five UAI files, whose scores are natural
logarithms; on these, pytoulbar2 is timed in the same run, if it is installed. The data are looked for in
data/mrf of the folder that DUALCRF_SHARED names, by default `shared` beside this repository.
"""

import argparse
import importlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import dualcrf
from common import ROOT, report
from dualcrf.files import Model, read_uai
from dualcrf.solver.search import Progress

FOLDER = Path(os.environ.get("DUALCRF_SHARED", ROOT.parent / "shared")) / "data" / "mrf"


class Published(NamedTuple):
    """Scores of the best labelling known and of the best bound, and the time that `solve` is given."""

    energy: float
    bound: float
    seconds: float | None = None


MODELS = {
    "tsukuba": Published(-369_252, -369_217.57, 18),
    "penguin": Published(-15_349_729, -15_343_532, 40),
    "Grids_11": Published(387.894789, 387.894789),
    "Grids_12": Published(695.824870, 695.824870),
    "Segmentation_11": Published(-56.036789, -56.036789),
    "Segmentation_12": Published(-24.233552, -24.233552),
    "ObjectDetection_11": Published(-241.359037, -241.359037),
}


def tsukuba(path: Path) -> Model:
    with np.load(path) as file:
        data = {key: torch.from_numpy(file[key].astype(np.float32)) for key in ("unary_cost", "compat_cost")}
        weight = [torch.from_numpy(file[f"weight_{way}"].astype(np.float32)) for way in ("horizontal", "vertical")]
    height, width, labels = data["unary_cost"].shape
    pairwise = dualcrf.Weighted(torch.cat([w.flatten() for w in weight]), -data["compat_cost"])
    return Model(-data["unary_cost"].view(-1, labels), pairwise, dualcrf.grid(height, width))


def penguin(path: Path) -> Model:
    with np.load(path) as file:
        observed, known = torch.from_numpy(file["observed"].astype(np.float32)), torch.from_numpy(file["known"])
    graph, label = dualcrf.grid(*observed.shape), torch.arange(256.0)
    unary = -torch.where(known[..., None], (observed[..., None] - label) ** 2, 0)
    compat = -25 * ((label[:, None] - label) ** 2).clamp(max=200)
    return Model(unary.view(-1, 256), dualcrf.Weighted(torch.ones(graph.num_edges), compat), graph)


IMAGES = {"tsukuba": tsukuba, "penguin": penguin}


def read(name: str) -> Model:
    return IMAGES[name](FOLDER / f"{name}.npz") if name in IMAGES else read_uai(FOLDER / f"{name}.uai")


def measure(name: str, published: Published) -> list[dict[str, Any]]:
    # What is compiled on first use is not the solver's time; what is made for a graph is, so that each run has its own.
    first = read(name)
    dualcrf.solve(first.unary, first.pairwise, first.graph, iterations=1)
    model, seen = read(name), []

    def note(progress: Progress) -> None:
        seen.append((progress.seconds, float(progress.primal)))

    begun = time.perf_counter()
    solution = dualcrf.solve(model.unary, model.pairwise, model.graph, time_limit=published.seconds, callback=note)
    seconds = time.perf_counter() - begun
    energy, bound = float(solution.primal), float(solution.dual)
    seen.append((seconds, energy))
    near = published.energy - (1e-3 * abs(published.energy) if name in IMAGES else 1e-5)
    ours = {
        "seconds": seconds,
        "s to energy": next((s for s, value in seen if value >= near), "-"),
        "iterations": int(solution.iterations),
        "status": solution.status,
    }
    rows = [row_of(name, "dualcrf", energy, bound) | ours]
    if name not in IMAGES and importlib.util.find_spec("pytoulbar2") is not None:
        energy, seconds = exact(name, model)
        rows.append(row_of(name, "toulbar2", energy, energy) | {"seconds": seconds, "s to energy": seconds})
    return rows


def row_of(name: str, solver: str, energy: float, bound: float) -> dict[str, Any]:
    """Percentages are of the published figures: what the energy falls short by, and what the bound lies above."""
    best = MODELS[name]
    return {
        "model": name,
        "solver": solver,
        "energy": energy,
        "published energy": best.energy,
        "short by %": 100 * (best.energy - energy) / abs(best.energy),
        "bound": bound,
        "published bound": best.bound,
        "above by %": 100 * (bound - best.bound) / abs(best.bound),
        "gap": bound - energy,
    }


def exact(name: str, model: Model) -> tuple[float, float]:
    """The optimum by toulbar2, and the seconds that it takes."""
    toulbar2 = importlib.import_module("pytoulbar2")
    begun = time.perf_counter()
    problem = toulbar2.CFN()
    problem.Read(str(FOLDER / f"{name}.uai"))
    found = problem.Solve()
    seconds = time.perf_counter() - begun
    assert found is not None, f"toulbar2 found no labelling of {name}"
    return float(dualcrf.energy(torch.tensor(found[0]), model.unary, model.pairwise, model.graph)), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all if none is named")
    names = parser.parse_args().models or list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    if not FOLDER.is_dir():
        sys.exit(f"{FOLDER} is not there: set DUALCRF_SHARED to the folder that holds data/mrf")
    report("solve", [row for name in names for row in measure(name, MODELS[name])])


if __name__ == "__main__":
    main()
