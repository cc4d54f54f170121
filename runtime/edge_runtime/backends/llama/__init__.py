"""The llama.cpp backend."""
