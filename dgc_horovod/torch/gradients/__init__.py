"""From ``p.grad`` of one rank to ``p.grad`` of all."""
