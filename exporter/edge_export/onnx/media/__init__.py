"""The vision and audio towers of E2B and E4B as ONNX graphs."""
