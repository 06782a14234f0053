"""What folders of finished runs add up to: one long table, and tables and figures of it; what is missing is listed."""

from loopdropout_trainer.reports.averaging import average
from loopdropout_trainer.reports.plots import heat_plot, line_plot, save_figure
from loopdropout_trainer.reports.reading import ReportError, load_table


__all__ = ["ReportError", "average", "heat_plot", "line_plot", "load_table", "save_figure"]
