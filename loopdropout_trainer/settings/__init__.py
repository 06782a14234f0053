"""Settings: the fields of recipes and command lines, with their bounds, help and hints."""
