"""Plots for papers, as SVG or PNG files."""
