"""Gemma 4 as ONNX nodes, dynamic shapes."""
