"""The durable request queue service."""
