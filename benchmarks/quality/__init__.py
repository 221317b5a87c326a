"""Whether 0.1% of the gradient trains as well as all of it, and what each part of DGC contributes."""
