"""Language of formula tables: expressions, their functions, shape patterns and examples."""
