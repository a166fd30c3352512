"""What `openrlhf.agents.graders.math` is made of, in the order an answer passes through it.

`tidy` and `units` make LaTeX uniform, `tokens` cuts it, `shapes` finds what it is (a number, a list, an interval, a
matrix), `reader` reads one expression, `values` computes it, `regions` and `compare` decide whether two are equal.
`library` asks math-verify, in a process of its own, about what the reader leaves to it.

Why not math-verify (sympy, latex2sympy) alone: of the 496 pairs in `tests/agents/math_pairs.txt` math-verify 0.9 calls
59 equal ones different and 23 different ones equal (5 m and 5 cm, `40_8` and `40_9`, 3:30 AM and PM, `3^{-40}` and
`3^{-41}`), finds three equal in one direction only, and takes more than 5 s of CPU for three. What is written here
takes 0.8 ms for a pair, has a bound on every step, and runs in any thread.
"""
