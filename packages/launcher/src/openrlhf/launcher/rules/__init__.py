"""The constraints between flags. Every rule is a small function; all violations are reported at once."""

from openrlhf.launcher.rules.check import (
    check_ranges,
    check_rules,
    check_serve_rules,
    check_supervised_rules,
    warnings_of,
)
from openrlhf.launcher.rules.violation import Violation

__all__ = ["Violation", "check_ranges", "check_rules", "check_serve_rules", "check_supervised_rules", "warnings_of"]
