"""All tests marked `gpu` and all GPU benchmarks in one go, one report: runs/gpu/report.txt.

    python benchmarks/gpu_report.py [--out FOLDER]

The tests compile hundreds of kernels, each on one core: they run as several processes side by side.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from common import ROOT, commit

KINDS = ("dense", "additive", "weighted", "potts")
SHARDS = [f"{kind} and {half}" for kind in KINDS for half in ("hard", "not hard")] + [
    " and ".join(f"not {kind}" for kind in KINDS)
]
BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("bench_gpu*.py"))


def tests() -> tuple[bool, str]:
    """Whether all shards passed, and their closing lines; the whole output of one that failed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    running = [
        subprocess.Popen(
            [*command, "-k", shard], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for shard in SHARDS
    ]
    passed, lines = True, []
    for shard, process in zip(SHARDS, running, strict=True):
        output = process.communicate()[0]
        good = process.returncode in (0, 5)  # 5: the shard is empty
        passed &= good
        lines.append(f"{shard}: {output.strip().splitlines()[-1]}" if good else output[-6000:])
    return passed, "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: `make gpu` needs one; `make test` checks the kernels without")
    out.mkdir(parents=True, exist_ok=True)
    passed, summary = tests()
    parts = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit()}", summary]
    print("\n".join(parts), flush=True)
    for name in BENCHMARKS:
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / name)],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        passed &= done.returncode == 0
        parts.append(f"--- {name}\n{done.stdout}")
        print(parts[-1], flush=True)
    (out / "report.txt").write_text("\n".join(parts))
    sys.exit(0 if passed else "something failed: see above")


if __name__ == "__main__":
    main()
