"""Code benchmarks: EvalPlus scores the programs that a model has written, each one inside a sandbox of its own."""
