"""How gradients enter the residual, optimizer by optimizer."""
