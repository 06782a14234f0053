"""What folders of finished runs add up to: the paper's tables and figures, costs, and one page to look through it all.

Nothing is trained or generated here, and nothing is invented: what a table misses is listed as missing.
"""
