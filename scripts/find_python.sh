#!/bin/sh
# Print the Python to set up with: the first of 3.11, 3.12, 3.13 that starts and has `venv`. Otherwise say what to
# install. 3.11 comes first because the whole stack is tested with it.
found=
for name in python3.11 python3.12 python3.13 python3; do
  version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  case $version in 3.11 | 3.12 | 3.13) ;; *) continue ;; esac
  if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
    command -v "$name"
    exit 0
  fi
  found=${found:-$version}
done
if [ -n "$found" ]; then
  echo "set-up: Python $found is here, but not its venv module: apt-get install python$found-venv" >&2
else
  echo "set-up: Python 3.11, 3.12 or 3.13 is needed and none is on PATH: apt-get install python3 python3-venv" \
    "(Debian 12 and later, Ubuntu 24.04), or make PYTHON=/path/to/python3.12 ..." >&2
fi
exit 1
