"""Kernels: Triton for cards, numba for CPUs, and plain torch as the reference of both."""
