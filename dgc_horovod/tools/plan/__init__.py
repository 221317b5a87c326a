"""`dgcrun --plan`: which exchange, from how many workers on."""
