"""How the shipped reference pair is made: corpus, tokenizer, target, drafter, measurement.

Needs the `train` extra (torch, transformers). Knows nothing of bundles, GGUF or the runtime.
"""
