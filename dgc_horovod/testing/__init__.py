"""Access to the internals of a wrapped optimizer for tests, benchmarks and examples, and ranks without a network.

``testing.torch`` and ``testing.tensorflow`` show the parts of one optimizer; ``testing.loopback`` runs the collectives
of N ranks in one process. The rest of the package does not import this one. A view holds the package's own objects,
which may change from one version to the next: training scripts use the methods of the optimizer.
"""
