"""Exchanges: algorithms that turn every worker's selected elements of a bucket into one sum on all workers."""
