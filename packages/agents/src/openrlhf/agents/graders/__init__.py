"""Graders: short functions from an answer and its ground truth to True or False (or a share of tests passed).

exact and numeric compare text and numbers, `patterns` matches regular expressions and JSON schemas (extra `[schema]`),
`math` compares expressions (extra `[math]`), `code` runs programs against tests in a limited process. Import from the
module.
"""
