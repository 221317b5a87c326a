"""The kernels in C++, and their Python interface."""
