"""Pictures for papers, as SVG or PNG."""
