"""The errors of the runtime. Each message says what was wrong, with the value, and what to do.

EdgeRuntimeError
  BundleError     a bundle that cannot be used
  BackendError    a backend that is missing, too old, or failed
  RequestError    a prompt or an option that cannot be served
  ConfigError     a configuration that cannot be used
"""

from edge_devices.errors import EdgeError

OUT_OF_MEMORY = "there is not enough memory; close other programs, or ask for less (a shorter context, a smaller model)"


class EdgeRuntimeError(EdgeError):
    """Base of the errors of the runtime."""


class BundleError(EdgeRuntimeError):
    """The bundle is missing, damaged, newer than this version, or needs a feature that this runtime does not have."""


class BackendError(EdgeRuntimeError):
    """The library behind a backend is missing or unsuitable, or it failed to load or decode."""


class RequestError(EdgeRuntimeError):
    """The request does not fit the model: empty prompt, context overflow, draft longer than the rewind slack."""


class ConfigError(EdgeRuntimeError):
    """The `speculative_decoding:` block has an unknown key, a value out of range, or a combination that is not supported."""
