"""Scripts as users of each library write them; ``if run.compression`` marks the lines that compression adds."""
