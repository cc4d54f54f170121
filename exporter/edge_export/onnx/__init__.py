"""Writes ONNX graphs: request, weights, graph builder, export, parity."""
