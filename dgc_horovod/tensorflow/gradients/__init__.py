"""From one rank's gradients to all ranks', inside a graph."""
