"""Quantizes: importance matrices, calibration, and llama.cpp's quantizer."""
