"""These tests need libraries that `nox -s clients` installs; elsewhere they are not collected."""

from importlib.util import find_spec

NEEDED = ("langgraph", "langchain_anthropic", "langchain_openai", "schemathesis")
collect_ignore_glob = [] if all(find_spec(name) for name in NEEDED) else ["test_*.py"]
