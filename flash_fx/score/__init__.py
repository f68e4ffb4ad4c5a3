"""The score language: what stands between QK^T and V, as a small pure program.

Nothing here knows FX, Triton or Jinja; only `evaluate` imports torch.
"""
