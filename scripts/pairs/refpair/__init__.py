"""How the shipped pairs are made: corpus, tokenizer, target, drafter, measurement. Needs the `train` extra (torch, transformers)."""
