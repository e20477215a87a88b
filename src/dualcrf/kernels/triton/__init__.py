"""The operations' kernels for NVIDIA GPUs, in Triton."""
