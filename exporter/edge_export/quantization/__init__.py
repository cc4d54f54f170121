"""Importance matrices, calibration and llama.cpp's quantizer."""
