"""Collectives alone on emulated hosts: what the planner says of the network, without compression beside it."""
