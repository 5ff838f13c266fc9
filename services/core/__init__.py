"""What the cores of all services share: pure, and knowing only the standard library, as they do."""
