"""The files of a run and of a sweep: results, recipes, and the code that they depend on."""
