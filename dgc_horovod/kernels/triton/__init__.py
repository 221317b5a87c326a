"""The kernels for CUDA, in Triton."""
