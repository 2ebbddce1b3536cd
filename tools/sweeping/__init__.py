"""The parts of tools/sweep.py: the names of libraries' models, and how they are built for real execution."""
