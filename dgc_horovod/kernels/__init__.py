"""Kernels: the contract (`schema`), its readable truth (`reference`), and the backends."""
