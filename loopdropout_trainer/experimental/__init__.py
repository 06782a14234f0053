"""What goes beyond the paper and may change: reinforcement learning."""
