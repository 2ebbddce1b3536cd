"""Golden outputs: everything that fvflops prints, writes and counts, saved as text and compared between two commits."""
