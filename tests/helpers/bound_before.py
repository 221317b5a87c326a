"""What a script has of Horovod that bound it before dgc_horovod was imported: ranks import this first."""

from horovod.torch import join

__all__ = ["join"]
