"""What a step costs beyond the optimizer itself, with each adapter: ``python -m benchmarks.adapters``."""
