"""`edge-bench`: what drafts bring on this machine. Records first, figures from them, so that figures can be made again from a file."""
