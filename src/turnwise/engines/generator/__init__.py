"""The generator: continuous batching over a KV cache, with hand-written decoding for the Llama family. Knows no tokenizer."""
