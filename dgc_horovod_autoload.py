"""torch calls `load` at the end of ``import torch``: it is an entry point of the group ``torch.backends``."""

import os


def load() -> None:
    """Let torch jobs be compressed without an edit, if a variable of ours is set; else import nothing."""
    if any(name.startswith("DGC_") for name in os.environ):
        from dgc_horovod.launch.site.sitecustomize import follow_torch

        follow_torch()
