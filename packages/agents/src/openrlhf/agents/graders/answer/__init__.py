"""What `openrlhf.agents.graders.math` is made of, in the order an answer passes through it.

`tidy` and `units` make LaTeX uniform, `tokens` cuts it, `shapes` finds what it is (a number, a list, an interval, a
matrix), `reader` reads one expression, `values` computes it, `regions` and `compare` decide whether two are equal.
`library` asks math-verify, in a process of its own, about what the reader leaves to it.
"""
