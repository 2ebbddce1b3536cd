"""The parts of tools/sweep.py: libraries of models, workers that count them, the CSV of results."""
