"""The file contract: the manifest, integrity, signature, and checks of every file before native code opens it."""
