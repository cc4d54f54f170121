"""Gemma 4 as ONNX nodes with dynamic shapes."""
