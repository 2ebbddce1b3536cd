"""ONNX models, turned into torch by onnx2torch."""
