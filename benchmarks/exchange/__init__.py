"""One step's exchange over shaped links, by every method a user could pick: ``python -m benchmarks.exchange``."""
