"""The launcher ``dgcrun``, and the build of Horovod that the set-up scripts use."""
