"""The credit scheduler service."""
