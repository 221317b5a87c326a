"""N hosts on one Linux machine, for Horovod's launcher over shaped links."""

from benchmarks.netlab.hosts import Lab
from benchmarks.netlab.lifecycle import lab
from benchmarks.netlab.network import NetlabError, unavailable

__all__ = ["Lab", "NetlabError", "lab", "unavailable"]
