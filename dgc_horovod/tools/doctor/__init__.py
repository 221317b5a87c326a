"""`dgcrun --doctor`: problems of the installation, and whether compression pays."""
