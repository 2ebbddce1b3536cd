"""Files for other programs: Perfetto, speedscope, flame graphs, Graphviz, Model Explorer."""
