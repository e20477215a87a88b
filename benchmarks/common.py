"""What every benchmark shares: the commit, timing, a table on the screen and a JSON line per row."""

from __future__ import annotations

import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """The commit that is measured, marked if files differ from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def best_of(run: Callable[[], Any], repeat: int = 5) -> float:
    """Seconds of the fastest of `repeat` runs after one that warms up: the least disturbed by the rest of the machine."""
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_memory(run: Callable[[], Any]) -> float:
    """GB that a run takes at its peak beyond what the process held before (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 2**20


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def report(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table and append them to runs/bench/NAME.jsonl."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[_show(row.get(key, "")) for key in columns] for row in rows]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns))]
    print(f"\n{name} · {commit()}")
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    folder = ROOT / "runs" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        for row in rows:
            file.write(
                json.dumps(
                    {"benchmark": name, "commit": commit(), "machine": platform.processor() or platform.machine(), **row}
                )
                + "\n"
            )


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
