"""What reports show: results as data frames, and their tables, figures and comparisons."""
