"""Shape rules that torch lacks or has too strict, and assumed sizes."""
