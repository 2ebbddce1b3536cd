"""Export files for Perfetto, speedscope, flame graphs, Graphviz and Model Explorer."""
