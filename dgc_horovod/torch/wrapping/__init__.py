"""Checks when an optimizer is wrapped, and messages to the user."""
