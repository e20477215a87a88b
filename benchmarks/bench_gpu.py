"""Times of the core operation on one NVIDIA GPU: messages along all chains, forward and forward + backward, beside
their floors.

    python benchmarks/bench_gpu.py [SIZE ...]

Each time is the median of replays of a CUDA graph that holds one call, over as many input sets as overflow the L2
cache.
"""

import argparse
import json
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

import dualcrf
from dualcrf.ops.chain import chain_messages
from dualcrf.ops.edges import EDGE_KINDS


class Size(NamedTuple):
    batch: int
    shape: tuple[int, ...]
    num_labels: int
    strides: tuple[int, ...]
    kind: str = "dense"
    gamma: float | None = 2.0
    dtype: torch.dtype = torch.float32  # of the potentials


SIZES = {
    "paper": Size(16, (33, 33), 21, (1, 2)),
    "paper, bf16 table": Size(16, (33, 33), 21, (1, 2), dtype=torch.bfloat16),
    "paper, hard": Size(16, (33, 33), 21, (1, 2), gamma=None),
    "paper, additive": Size(16, (33, 33), 21, (1, 2), "additive"),
    "paper, weighted": Size(16, (33, 33), 21, (1, 2), "weighted"),
    "batch 1": Size(1, (33, 33), 21, (1, 2)),
    "128×128": Size(1, (128, 128), 21, (1, 2)),
    "L = 64": Size(4, (33, 33), 64, (1, 2)),
    "L = 256": Size(1, (33, 33), 256, (1, 2)),
    "potts grid": Size(8, (257, 257), 21, (1, 3, 9, 27), "potts"),
    "potts grid, hard": Size(8, (257, 257), 21, (1, 3, 9, 27), "potts", None),
}


def inputs(size: Size, graph: dualcrf.Graph) -> tuple[Tensor, list[Tensor]]:
    """Random psi [B, S, L] and parameters, ready for gradients."""
    lengths = {"edges": graph.num_edges, "nodes": graph.num_nodes, "labels": size.num_labels}
    psi = torch.randn(size.batch, graph.num_places, size.num_labels, device="cuda").requires_grad_()
    parameters = [
        torch.randn(1 if name == "compat" else size.batch, *(lengths[axis] for axis in axes), device="cuda")
        .to(size.dtype)
        .requires_grad_()
        for name, axes in EDGE_KINDS[size.kind].parameters.items()
    ]
    return psi, parameters


def median_ms(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median"))  # pyright: ignore[reportArgumentType]


def replay_ms(call: Callable[[int], object], sets: int) -> float:
    """Median time of one call, in a graph that makes the call once for each of the input sets."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            call(i)
    return median_ms(graph.replay) / sets


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3


def measure(size: Size, bandwidth: float) -> dict[str, float]:
    """Milliseconds of forward and forward + backward, and of reading psi and the parameters once."""
    graph = dualcrf.grid(*size.shape, strides=size.strides)
    layout = graph.layout(torch.device("cuda"))
    gamma = None if size.gamma is None else torch.tensor(size.gamma, device="cuda")
    data = [inputs(size, graph)]
    once = data[0][0].nbytes + sum(p.nbytes for p in data[0][1])
    sets = max(1, min(8, 2**28 // once))
    data += [inputs(size, graph) for _ in range(sets - 1)]

    def forward(i: int) -> tuple[Tensor, ...]:
        psi, parameters = data[i]
        return chain_messages(psi, parameters, layout, size.kind, gamma, "triton")

    with torch.no_grad():
        outputs = forward(0)
    grads = [torch.randn_like(out) for out in outputs]

    def both(i: int) -> tuple[Tensor, ...]:
        psi, parameters = data[i]
        return torch.autograd.grad(forward(i), [psi, *parameters], grads)

    with torch.no_grad():
        forward_ms = replay_ms(forward, sets)
    return {"read once": once / bandwidth * 1e3, "forward": forward_ms, "forward + backward": replay_ms(both, sets)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of the core operation on a GPU.")
    parser.add_argument("sizes", nargs="*", default=list(SIZES), help=f"of {', '.join(SIZES)}")
    bandwidth = copy_bandwidth()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}, commit {commit}")
    print(f"{'ms':<20}{'read once':>12}{'forward':>12}{'fwd + bwd':>12}")
    results = {}
    for name in parser.parse_args().sizes:
        results[name] = measure(SIZES[name], bandwidth)
        print(f"{name:<20}" + "".join(f"{ms:>12.4f}" for ms in results[name].values()), flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "commit": commit, "ms": results}))


if __name__ == "__main__":
    main()
