"""What folders of finished runs add up to: one long table, and tables and figures of it.

Nothing is trained or generated here, and nothing is invented: what a table misses is listed as missing.
"""

from loopdropout_trainer.reports.averaging import average
from loopdropout_trainer.reports.plots import heat_plot, line_plot, save_figure
from loopdropout_trainer.reports.reading import ReportError, load_table


__all__ = ["ReportError", "average", "heat_plot", "line_plot", "load_table", "save_figure"]
