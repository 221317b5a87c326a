"""The exchange that a Keras job takes by its own clock."""
