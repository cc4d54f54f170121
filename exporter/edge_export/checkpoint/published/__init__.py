"""What was published for Gemma 4 besides plain checkpoints: sizes, hub names, tensor names, quantized formats."""
