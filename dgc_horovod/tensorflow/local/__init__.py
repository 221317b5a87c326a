"""Local steps: the user's optimizer steps on each rank alone, and every H steps the weights' changes are exchanged."""
