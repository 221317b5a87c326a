"""The exchange of gradients inside a graph."""
