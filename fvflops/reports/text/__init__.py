"""Text tables for terminals and Markdown."""
