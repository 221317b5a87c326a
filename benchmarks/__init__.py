"""Measurements behind the figures in README and docs. Each prints a table and writes JSON to results/."""
