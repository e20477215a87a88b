"""Compiled loops: `numba` for the CPU, `triton` for the GPU. They know tensors and nothing else of this library."""
