"""DeepSpeed's flops profiler: its calls, arguments and results."""
