"""The constraints between flags. Every rule is a small function; all violations are reported at once."""
