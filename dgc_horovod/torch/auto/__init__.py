"""The exchange that a job takes by its own clock."""
