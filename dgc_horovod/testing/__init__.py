"""What tests, benchmarks and examples read of a wrapped optimizer beyond its own methods, and ranks without a network.

``testing.torch`` and ``testing.tensorflow`` show the parts of one optimizer; ``testing.loopback`` carries the messages
of N ranks of one process. Nothing else of the package imports this one. What a view holds are the package's own
objects, which may change from one version to the next: training scripts use the methods of the optimizer.
"""
