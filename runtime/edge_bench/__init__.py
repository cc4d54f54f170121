"""`edge-bench`: measures what drafts gain on this machine. It writes raw records, from which all figures can be computed again."""
