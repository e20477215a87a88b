"""Kernels for the CPU. They compile when first used, and say so; later processes find them in Numba's cache."""

import logging

from numba.core import event


class _Notice(event.Listener):
    """One line in the log when a process first has to compile a kernel: it explains a wait of some seconds."""

    def __init__(self) -> None:
        self.given = False

    def on_start(self, event: event.Event) -> None:
        function = event.data["dispatcher"].py_func
        if not self.given and function.__module__.startswith(__name__):
            self.given = True
            logging.getLogger("dualcrf").warning("compiling CPU kernels: some seconds now, cached for later processes")

    def on_end(self, event: event.Event) -> None:
        pass


event.register("numba:compile", _Notice())
