"""Who calls, and what they may: API keys, services' certificates, roles."""
