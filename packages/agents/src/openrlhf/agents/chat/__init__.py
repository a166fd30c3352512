"""The OpenAI-compatible chat server around the policy (extra `[server]`), which records token-level samples.

`session` is the heart: it turns chat messages into prompt tokens without ever tokenising a sampled token again.
"""
