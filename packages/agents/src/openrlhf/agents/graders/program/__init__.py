"""What `openrlhf.agents.graders.code` is made of.

`blocks` finds the program in a response, `prelude` offers the names that judges offer, `sandbox` starts a run,
`supervisor` (a process of its own) sets the limits and ends whatever was started. `isolation` finds out what can keep a
program apart on this machine, `confine` does it where bubblewrap does not. Tests in Python run in `judge`, a process
that the program cannot see; it calls the program, which `runner` holds, over the line that `wire` describes.
"""
