"""The state of a rank: records, checkpoints, redistribution to other ranks."""
