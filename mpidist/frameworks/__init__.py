"""Which library a model is written in: one adapter each."""
