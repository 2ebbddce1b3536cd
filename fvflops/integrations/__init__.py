"""The training loops that people use: a file for each, whose library is imported with it."""
