"""`dgcrun --plan`: the best exchange for each number of workers."""
