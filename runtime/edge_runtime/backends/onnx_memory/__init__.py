"""The memory that an ONNX graph needs, computed from its shapes before onnxruntime opens it."""
