"""A page that shows what a run did: `dgcrun --report` and ``python -m dgc_horovod.report``."""
