"""The parts of tools/sweep: the libraries whose models it builds, the workers that count them, the CSV of results."""
