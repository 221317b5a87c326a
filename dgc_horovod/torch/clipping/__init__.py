"""A script's calls that clip, and the local clipping that they become."""
