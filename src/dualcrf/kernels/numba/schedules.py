"""The schedules' sweeps on the CPU, as `ops/schedules.py` asks for them."""

from dualcrf.kernels.numba.handover import handover_sweeps
from dualcrf.kernels.numba.labels import decode_labels, improve_labels
from dualcrf.kernels.numba.wavefront import wavefront_sweeps

__all__ = ["decode_labels", "handover_sweeps", "improve_labels", "wavefront_sweeps"]
