"""The CUDA kernels, checked and timed on a machine with one GPU, torch and Triton: ``scripts/gpu_check``."""
