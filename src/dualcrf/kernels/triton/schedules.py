"""The schedules' sweeps on the GPU, as `ops/schedules.py` asks for them."""

from dualcrf.kernels.triton.handover import handover_sweeps
from dualcrf.kernels.triton.labels import decode_labels, improve_labels
from dualcrf.kernels.triton.wavefront import wavefront_sweeps

__all__ = ["decode_labels", "handover_sweeps", "improve_labels", "wavefront_sweeps"]
