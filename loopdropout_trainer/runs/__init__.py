"""What surrounds a training: the plan before it, the result after it, and sweeps of many."""
