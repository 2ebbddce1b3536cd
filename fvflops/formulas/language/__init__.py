"""The language of formula tables: expressions, shape patterns, their functions and examples."""
