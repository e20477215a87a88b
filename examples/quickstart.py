"""The first look: a noisy picture of four labels, restored with a proof of how good the answer is.

    python examples/quickstart.py [--out FOLDER]

Writes denoise.png (truth, noisy, independent pixels, the MAP) and convergence.png to runs/demo.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.colors import ListedColormap

import dualcrf


def picture(size: int = 96) -> torch.Tensor:
    """Discs and a bar on a background: labels [size, size]."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    labels = torch.zeros(size, size, dtype=torch.long)
    labels[(x + 0.35) ** 2 + (y + 0.3) ** 2 < 0.2] = 1
    labels[(x - 0.4) ** 2 + (y - 0.35) ** 2 < 0.16] = 2
    labels[(x - y).abs() < 0.12] = 3
    return labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    truth = picture()
    graph = dualcrf.grid(*truth.shape)
    unary = torch.nn.functional.one_hot(truth, 4).float().flatten(0, 1) + 0.9 * torch.randn(truth.numel(), 4)
    pairwise = dualcrf.Potts(torch.full((graph.num_edges,), 0.9))

    print("Solving; the first run on a machine compiles the kernels, which takes some seconds.", flush=True)
    start = time.perf_counter()
    solution = dualcrf.solve(unary, pairwise, graph, history=True)
    seconds = time.perf_counter() - start
    restored, alone = solution.labels.view_as(truth), unary.argmax(1).view_as(truth)
    print(
        f"score {float(solution.primal):.3f}, bound {float(solution.dual):.3f}, gap {float(solution.gap):.2g}: "
        f"no labelling scores more than the bound ({seconds:.1f} s)"
    )
    print(f"wrong pixels: {(alone != truth).float().mean():.1%} alone, {(restored != truth).float().mean():.1%} with the CRF")

    colours = ListedColormap(["#f4f1de", "#e07a5f", "#3d405b", "#81b29a"])
    noisy = (unary.softmax(1) @ torch.tensor(colours(range(4))[:, :3], dtype=torch.float32)).view(*truth.shape, 3)
    panels = {
        "truth": truth,
        "noisy": noisy.clamp(0, 1),
        "independent pixels": alone,
        f"MAP, gap {float(solution.gap):.1g}": restored,
    }
    axes = pyplot.subplots(1, 4, figsize=(12, 3.4))[1]
    for panel, (title, image) in zip(axes, panels.items(), strict=True):
        panel.imshow(image, cmap=colours, vmin=-0.5, vmax=3.5, interpolation="nearest")
        panel.set_title(title)
        panel.axis("off")
    pyplot.tight_layout()
    pyplot.savefig(out / "denoise.png", dpi=90)
    dualcrf.plot_convergence(solution).figure.savefig(out / "convergence.png", dpi=90)
    print(f"pictures in {out}/")


if __name__ == "__main__":
    main()
