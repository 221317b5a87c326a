"""`dgcrun --doctor`: what is in the way, and whether compression pays."""
