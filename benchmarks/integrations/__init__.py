"""Other libraries' training loops, with and without compression: exact, equal replicas, bytes, learning, resuming."""
