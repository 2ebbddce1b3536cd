"""Features whose first answer in a process is compared with later ones, and the processes that run them."""
