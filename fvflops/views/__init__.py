"""Rows, breakdowns and rankings of counts, from plain data, for reports and for programs."""
