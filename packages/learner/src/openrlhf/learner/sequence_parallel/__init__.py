"""Sequence parallelism: a packed row of tokens is cut over the ranks of a group, each of which holds the whole model.

`group`: who is in a group and what its ranks send each other. `slicing`: which rank has which tokens. `attention`: how
a layer attends over all of them. `check`: which models it is exact for.
"""
