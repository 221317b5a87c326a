"""A script's clipping calls, and the local clipping that replaces them."""
