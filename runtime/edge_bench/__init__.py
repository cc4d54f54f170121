"""`edge-bench`: measures what drafts gain. It writes raw records, from which all figures can be computed again."""
