"""What runs in the ranks of a job that `dgcrun` has started."""
