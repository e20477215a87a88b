"""A kernel over many chains on all cores: plain threads, since the kernels release the GIL.

Numba's own thread layers stop the process when two Python threads meet in one, or after a fork; these do not, and they obey
`torch.set_num_threads`.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

_CHUNKS_PER_THREAD = 4  # chains differ in length; a thread that is done early takes another chunk


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="dualcrf")


def chunks(count: int) -> int:
    """Into how many pieces `parallel` cuts `count` items."""
    threads = torch.get_num_threads()
    return min(count, threads * _CHUNKS_PER_THREAD) if threads > 1 else min(count, 1)


def parallel(kernel: Callable[..., Any], count: int, *args: Any) -> None:
    """Run kernel(first, last, chunk, *args) over pieces [first, last) of range(count), chunk counting the pieces."""
    pieces = chunks(count)
    bounds = [count * k // pieces for k in range(pieces + 1)] if pieces else []
    if pieces <= 1:
        for k in range(pieces):
            kernel(bounds[k], bounds[k + 1], k, *args)
        return
    pool = _pool(torch.get_num_threads(), os.getpid())
    for done in [pool.submit(kernel, bounds[k], bounds[k + 1], k, *args) for k in range(pieces)]:
        done.result()
