"""Matrix products for few rows: C++ kernels that read quantized weights once for a whole verify, built with the package."""
