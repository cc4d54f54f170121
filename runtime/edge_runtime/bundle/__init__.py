"""The file contract: manifest, integrity, signature, and checks of every file before native code opens it."""
