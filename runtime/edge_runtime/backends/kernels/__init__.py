"""The row kernels: C++ matrix products for few rows, which read quantized weights once for a whole verify. Built with the package."""
