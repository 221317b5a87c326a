"""How fast the kernels are and how small the packets: ``python -m benchmarks.kernels``."""
