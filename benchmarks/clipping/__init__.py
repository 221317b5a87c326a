"""Scripts that clip by themselves, under ``dgcrun``: what comes of it."""
