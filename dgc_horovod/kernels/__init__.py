"""Kernels: the contract (`contract`), its NumPy reference (`reference`), and the backends."""
