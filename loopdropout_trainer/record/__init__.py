"""What is on record: what a number depends on (its identity), and the numbers themselves (measurements, one row each)."""
