"""Costs of a step with each exchange, and the choice between exchanges."""
