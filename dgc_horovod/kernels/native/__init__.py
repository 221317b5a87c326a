"""The kernels in C++, and how Python finds and calls them."""
