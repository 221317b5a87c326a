"""Training time on shaped links: ``python -m benchmarks.training``; what it finds: `benchmarks.training.analysis`."""
