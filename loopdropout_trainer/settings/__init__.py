"""YAML recipes and command lines, and the dataclasses that they fill."""
