"""Kernels in plain torch, for every device."""
