"""The parts of sessions that need no tensors of a framework; adapters build on them."""
