"""Tables for papers, in Markdown and LaTeX."""
