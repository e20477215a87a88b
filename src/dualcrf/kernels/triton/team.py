"""Programs that work through the levels of an item together: one launch for all levels of all sweeps.

The programs of a launch form teams of equal size; an item of the batch belongs to one team, and a team meets after every
level. For that all programs must be on the device at once, which a cooperative launch sees to. The interpreter runs one
program after the other: there a team is a single program.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (kernels are Triton's language, which only looks like Python)

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualcrf.kernels.order import SweepOrder
from dualcrf.kernels.triton.tiles import INTERPRETED

_COUNTER = tl.constexpr(32)  # int32 between two teams' counters: a cache line, so that teams do not get in each other's way


@triton.jit
def meet(counters, team, arrivals):
    """Wait until the programs of a team have arrived so often altogether; what they wrote before is then to be seen."""
    counter = counters + team * _COUNTER
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while _arrived(counter) < arrivals:
        pass
    tl.debug_barrier()


@triton.jit
def _arrived(counter):
    if INTERPRETED:
        count = tl.load(counter)
    else:
        # A load that acquires, where tl has only read-modify-writes: those would queue up before the arrivals.
        count = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], tl.int32, is_pure=False, pack=1
        )
    return count


class Teams(NamedTuple):
    """How the programs of a launch are shared out."""

    count: int
    size: int  # programs in a team
    counters: Tensor

    @property
    def arguments(self) -> tuple[Tensor, int, int]:
        """The last arguments of every such kernel."""
        return self.counters, self.count, self.size

    @property
    def grid(self) -> tuple[int]:
        """The launch's grid."""
        return (self.count * self.size,)


def gather_teams(kernel: Any, arguments: Sequence[Any], options: dict[str, Any], batch: int, tasks: int) -> Teams:
    """As many teams as there are items, and as many programs in each as have one of `tasks` to do and fit the device.

    Args:
        kernel: the kernel to be launched, with its arguments but for the last, `Teams.arguments`.
    """
    device = arguments[0].device
    counters = torch.zeros(batch * _COUNTER.value, dtype=torch.int32, device=device)
    if INTERPRETED.value:
        return Teams(batch, 1, counters)
    compiled = kernel.warmup(*arguments, counters, 1, 1, grid=(1,), **options)
    compiled._init_handles()
    threads = 32 * options["num_warps"]
    properties = torch.cuda.get_device_properties(device)
    registers = -(-compiled.n_regs // 8) * 8 * threads
    most = properties.max_threads_per_multi_processor
    # The processors of data centres, with room for 2,048 threads, take 32 programs; the others 16 at least.
    per_processor = min(32 if most == 2048 else 16, most // threads, properties.regs_per_multiprocessor // registers)
    if compiled.metadata.shared:
        # The system keeps 1 KB of every program's shared memory for itself.
        per_processor = min(per_processor, properties.shared_memory_per_multiprocessor // (compiled.metadata.shared + 1024))
    capacity = per_processor * properties.multi_processor_count
    teams = min(batch, capacity)
    return Teams(teams, max(1, min(tasks, capacity // teams)), counters)


def widest(order: SweepOrder) -> int:
    """The most nodes on one level."""
    return max(last - first for first, last in pairwise(order.levels))
