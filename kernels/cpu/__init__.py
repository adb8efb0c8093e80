"""Kernels for the CPU, compiled for the processor and the shape."""
