"""Hosts of several ranks each behind one card: every worker's packet to every worker, or one of each node."""
