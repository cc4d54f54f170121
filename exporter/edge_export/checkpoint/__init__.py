"""Reading sources: hub ids, folders, safetensors, GGUF, tokenizer, all untrusted."""
