"""The speculative loop (draft, verify, accept, roll back) and the sampling maths."""
