"""Training over links like those of the internet: ``python -m benchmarks.internet``."""
