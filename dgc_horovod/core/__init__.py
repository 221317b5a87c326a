"""One rank: buckets, selection, residual and momentum, and the step that they are at."""
