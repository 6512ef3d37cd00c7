"""What L1 would answer at other sizes, from a sample of what it is asked for."""
