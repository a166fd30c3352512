"""What a run may write, replace and delete in the folders of its user, and nothing else.

One rule for exports, adapters, checkpoints, logs and temporary folders: a run never changes or removes a file that no
run wrote.

- `lock`: a folder in use belongs to one run; only what dead runs left is removed.
- `manifest`: which files of a folder runs wrote, and how they looked then. A file that was changed since is the user's.
- `publish`: an export goes into its folder file by file, each complete or absent, the manifest last.
- `files`: writing that survives a crash, and modes by the umask.
- `trial`: what the end of a run needs, tried at its start.

Standard library only; nothing here knows of models.
"""
