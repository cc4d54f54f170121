"""Puts the project's own operators in the place of stock ones in a graph, before onnxruntime reads it."""
